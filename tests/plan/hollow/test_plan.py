"""The plan of a run, against other ways to know: a closed form of the parameters, a model built on
the CPU, every stage and microbatch stepped, NCCL's own calls, the formula of the balance loss."""

import re
import shlex
from collections import Counter
from importlib.util import find_spec

import pytest

from megasink.plan import whole_job
from megasink.plan.rank_memory import PARTS
from tests.distributed.layout import SINGLE

MODEL = (
    "--hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --lr 1e-3 --normalization RMSNorm --swiglu --ffn-hidden-size 512 "
    "--disable-bias-linear --position-embedding-type rope --mock-data --train-iters 100 "
    "--tokenizer-type NullTokenizer --vocab-size 256 --bf16 --head-balance-coeff 1e-3 "
    "--use-distributed-optimizer --log-interval 1"
)
GROUPS = "--group-query-attention --num-query-groups 4"
ELEMENTWISE = "--attention-variant gated --gate-granularity elementwise"
LATENT = (
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 24 --qk-layernorm --attention-variant gated"
)
SWITCH = "--switch-heads value --switch-experts 3"
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-layer-freq [0]+[1]*3 "
    "--moe-token-dispatcher-type alltoall"
)
UNTIED = "--untie-embeddings-and-output-weights"
TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
SP = "--sequence-parallel"


def flags_of(text, layers, batch):
    return shlex.split(f"{MODEL} --num-layers {layers} --global-batch-size {batch} {text}")


def records_of(gpu, text, ranks=1, layers=4, batch=32, stages=None):
    """Of the ranks that the command would step, or of these stages."""
    flags = flags_of(text, layers, batch)
    first = gpu.run("plan_tasks:step", flags=flags, ranks=ranks)
    facts = first["job"]
    numbers = {
        stage: whole_job.rank_of(stage, facts, last=True) for stage in range(facts["pipeline"])
    }
    stages = whole_job.stages_to_step(facts) if stages is None else stages
    return [
        gpu.run("plan_tasks:step", flags=flags, number=numbers[stage], ranks=ranks)
        if numbers[stage]
        else first
        for stage in stages
    ]


def closed_form(variant, groups=8, layers=4, experts=0, untied=False, switch=0, latent=False):
    """Parameters by component: hidden 256, 8 heads of 32, 256 ids, a gated MLP of 512."""
    hidden, heads, dim, tokens, ffn, expert_ffn = 256, 8, 32, 256, 512, 128
    dense = 1 if experts else layers
    sparse = layers - dense
    gate_rows = {"headwise": heads, "elementwise": heads * dim}.get(variant, 0)
    found = {
        "embedding": tokens * hidden,
        "output layer": tokens * hidden * untied,
        "attention qkv": layers * hidden * dim * (heads + 2 * groups),
        "attention output": layers * hidden * hidden,
        "attention gates": layers * hidden * gate_rows,
        "switch heads": layers * hidden * groups * switch,
        "attention sinks and biases": layers * heads * (variant == "sink"),
        "MLP": dense * 3 * hidden * ffn,
        "experts": sparse * experts * 3 * hidden * expert_ffn,
        "router": sparse * experts * hidden,
        "norms": (2 * layers + 1) * hidden,
    }
    if latent:  # keys of 48 and values of 24
        down, up = hidden * (96 + 64 + 16), heads * (96 * 48 + 64 * (32 + 24))
        found["attention qkv"] = layers * (down + up)
        found["attention output"] = layers * hidden * heads * 24
        found["norms"] += layers * (96 + 64)
    return {name: number for name, number in found.items() if number}


@pytest.mark.parametrize(
    ("text", "ranks", "wanted"),
    [
        ("--attention-variant vanilla", 1, {"variant": "vanilla"}),
        (f"--attention-variant sink {TP} 2 {SP}", 4, {"variant": "sink"}),
        (f"--attention-variant gated {GROUPS} {PP} 2", 4, {"variant": "headwise", "groups": 4}),
        (f"{ELEMENTWISE} {GROUPS} {TP} 2 {UNTIED}", 2, {"variant": "elementwise", "groups": 4}),
        (f"{MOE} {UNTIED} --expert-model-parallel-size 2 {PP} 2", 8, {"experts": 8}),
        (f"{GROUPS} {TP} 8 {PP} 4", 64, {"groups": 4}),
        (f"{SWITCH} {GROUPS} {TP} 2", 2, {"groups": 4, "switch": 2 * 32 + 3}),
        (f"{LATENT} {TP} 2 {SP}", 2, {"variant": "headwise", "latent": True}),
    ],
    ids=[
        *("vanilla", "sink-TP", "headwise-PP", "elementwise-TP", "experts-PP-EP"),
        *("TP-above-groups", "switch-TP", "latent-TP"),
    ],
)
def test_parameters_are_exact_in_every_layout(gpu, pool, text, ranks, wanted):
    records = records_of(gpu, text, ranks)
    found = whole_job.parameters(records)
    options = {"variant": "sink", "untied": UNTIED in text} | wanted
    assert {name: number for name, number in found.items() if number} == closed_form(**options)
    # What a machine's memory is compared with: without elementwise gates and copies on other ranks.
    stages = [stage.memory for stage in whole_job.memory(records)]
    planned = sum(memory[part] for memory in stages for part in PARTS) / len(stages)
    state, _ = gpu.run("plan_tasks:least_memory", flags=flags_of(text, 4, 32), ranks=ranks)
    least = 0.99 if options["variant"] in ("vanilla", "sink") and PP not in text else 0.75
    assert least * planned <= state <= 1.01 * planned
    whole = re.sub(r"--(sequence-parallel|[\w-]+-parallel-size \d+)", "", text)
    (built,) = pool.run(
        "tests.plan.tasks:number_of_parameters", SINGLE, flags=flags_of(whole, 4, 32)
    )
    assert sum(found.values()) == built


def test_a_hybrid_of_like_blocks_has_the_plan_of_its_gpt_model(gpu):
    gpt = records_of(gpu, f"{PP} 2", ranks=2)
    hybrid = records_of(gpu, f"{PP} 2 --hybrid-layer-pattern *-*-|*-*-", ranks=2, layers=8)
    assert whole_job.parameters(hybrid) == whole_job.parameters(gpt)
    assert [record["layers"] for record in hybrid] == [record["layers"] for record in gpt]
    assert [stage.layers for stage in whole_job.memory(hybrid)] == [[1, 2], [3, 4]]


def test_a_stage_in_between_is_as_if_it_was_stepped(gpu):
    text = f"{PP} 6 {TP} 2 {SP} {CP} 2 --attention-variant gated"
    told = whole_job.memory(records_of(gpu, text, ranks=48, layers=6))
    assert [stage.rank for stage in told] == [0, 8, None, None, 32, 47]
    for stage in (2, 3):
        (record,) = records_of(gpu, text, ranks=48, layers=6, stages=[stage])
        stepped = whole_job.stage_of(record)
        assert stepped.layers == told[stage].layers == [stage + 1]
        assert stepped.in_flight == told[stage].in_flight == 6 - stage
        assert stepped.parameters == told[stage].parameters
        for part, size in stepped.memory.items():
            if part != "reserved":  # in blocks of 2 and 20 MiB
                assert told[stage].memory[part] == pytest.approx(size, rel=1e-3, abs=4096), part


@pytest.mark.parametrize("text", ["", f"{TP} 2 {SP} {CP} 2 {PP} 2"], ids=["one", "all"])
def test_memory_and_communication_are_those_of_the_trainer(gpu, text):
    """Which steps three times with its own data and all microbatches; NCCL's calls are counted."""
    ranks, rank = (1, 0) if not text else (16, 8)
    flags = flags_of(text, 4, 12 if text else 3)
    trainer = [*flags, "--train-iters", "3", "--log-interval", "100", "--num-workers", "0"]
    trainer += ["--eval-iters", "0", "--eval-interval", "100"]
    real = gpu.run("trainer_tasks:step", flags=trainer, rank=rank, ranks=ranks)
    plan = gpu.run("plan_tasks:step", flags=flags, number=rank, ranks=ranks)
    assert plan["job"]["microbatches"] == (6 if text else 3)
    stage = whole_job.stage_of(plan)
    assert stage.memory["peak"] == pytest.approx(real["peak"], rel=0.01)
    state = sum(stage.memory[p] for p in ("parameters", "gradients", "optimizer", "buffers"))
    assert state == pytest.approx(real["before"], rel=0.01)
    assert stage.parameters == real["parameters"]

    counted: Counter[str] = Counter()
    for kind, size, members, calls in real["collectives"]:
        if members > 1:  # NCCL is told of the share that a rank gets of a scatter
            counted[kind] += size * calls * (members if kind == "ncclReduceScatter" else 1)
    told: Counter[str] = Counter()
    for (_, _, kind, _), sums in whole_job.step_traffic(plan).items():
        told[kind] += sums["messages"]
    names = {
        "all-reduce": "ncclAllReduce",
        "all-gather": "ncclAllGather",
        "reduce-scatter": "ncclReduceScatter",
        "send": "ncclSend",
        "receive": "ncclRecv",
    }
    for kind, name in names.items():
        assert told[kind] == counted[name], kind


@pytest.mark.parametrize("scope", ["global", "data-parallel", "microbatch"])
def test_the_balance_loss_sends_what_its_formula_says_at_1024_ranks(gpu, scope):
    text = f"{TP} 8 {SP} {PP} 8 --head-balance-scope {scope}"
    layers, batch = 8, 16 * 40
    (record,) = records_of(gpu, text, 1024, layers=layers, batch=batch, stages=[7])
    counted: Counter[str] = Counter()
    for (_, ranks, _, purpose), sums in whole_job.step_traffic(record).items():
        if purpose == whole_job.BALANCE:
            counted[ranks, "calls"] += sums["calls"]
            counted[ranks, "bytes"] += sums["messages"]
    # 40 microbatches of one layer, over TP x DP or TP; [L, 2 H + 3] float64 over all ranks.
    of_scope = {"global": 0, "data-parallel": 128, "microbatch": 8}[scope]
    wanted = {(1024, "calls"): 1, (1024, "bytes"): 8 * layers * (2 * 8 + 3)}
    if of_scope:
        wanted |= {(of_scope, "calls"): 40, (of_scope, "bytes"): 40 * 4 * (8 + 2)}
    assert counted == wanted


def test_the_distributed_optimizer_shards_twelve_bytes_of_a_parameter(gpu):
    (sharded,) = records_of(gpu, "", ranks=4)
    flags = [f for f in flags_of("", 4, 32) if f != "--use-distributed-optimizer"]
    whole = gpu.run("plan_tasks:step", flags=flags, ranks=4)
    parameters = sum(whole["parameters_here"].values())
    # fp32 weight and two moments; of the few fp32 parameters (sinks) no second weight.
    sinks = whole["parameters_here"]["attention sinks and biases"]
    steps = 4 * 60  # torch's Adam has a step for each parameter
    wanted = 12 * parameters - 4 * sinks
    assert whole["training_state"]["optimizer"] == pytest.approx(wanted, abs=4096 + steps)
    assert sharded["training_state"]["optimizer"] == pytest.approx(wanted / 4, rel=0.01)
    assert whole["training_state"]["gradients"] == pytest.approx(4 * parameters, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_of_mamba_and_delta_net_are_exact_without_their_packages(gpu, ranks):
    sizes = "--mamba-num-heads 8 --mamba-head-dim 64 --mamba-num-groups 4 --mamba-state-dim 16 "
    sizes += "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 "
    sizes += f"--linear-value-head-dim 32 --attention-variant vanilla {TP} {ranks}"
    pattern = "--hybrid-layer-pattern M-G-*-"
    (record,) = records_of(gpu, f"{sizes} {pattern}", ranks=ranks, layers=6)
    inner, heads, states, key, value = 512, 8, 4 * 16, 4 * 16, 8 * 32
    # [z, x, B, C, dt], convolution with its bias, A, D and the bias of dt, norm, output
    mamba = 256 * (2 * inner + 2 * states + heads) + (inner + 2 * states) * 5 + 3 * heads
    mamba += inner + inner * 256
    # [q, k, v, gate, beta, alpha], convolution, A and the bias of dt, norm of a head, output
    delta = 256 * (2 * key + 2 * value + 2 * 8) + (2 * key + value) * 4 + 2 * 8 + 32 + value * 256
    others = 256 * 256 + 3 * 3 * 256 * 512 + 4 * 256 * 256 + 7 * 256
    assert sum(whole_job.parameters([record]).values()) == mamba + delta + others


@pytest.mark.skipif(find_spec("emerging_optimizers") is None, reason="megasink[muon] is missing")
def test_the_distributed_optimizer_shards_the_states_of_muon(gpu):
    flags = [*flags_of(f"{UNTIED} --optimizer muon", 4, 32), "--attention-variant", "gated"]
    sharded = gpu.run("plan_tasks:step", flags=flags, ranks=4)
    flags.remove("--use-distributed-optimizer")
    whole = gpu.run("plan_tasks:step", flags=flags, ranks=4)
    here = whole["parameters_here"]
    of_adam = here["embedding"] + here["output layer"] + here["norms"]
    # fp32 weight and momentum of matrices, and one moment more of the others.
    wanted = 8 * sum(here.values()) + 4 * of_adam
    assert whole["training_state"]["optimizer"] == pytest.approx(wanted, rel=0.01)
    # Matrices are not cut, so that some replicas hold more of them than others.
    share = sharded["training_state"]["optimizer"] / wanted
    assert 0.2 < share < 0.3


@pytest.mark.parametrize("package", ["flash-attn-2", "apex"])
def test_packages_that_hold_as_much(gpu, package):
    """Stepped with a stand-in of the package's host side."""
    flags = flags_of("", 4, 2)
    without = gpu.run("plan_tasks:step", flags=flags)
    plan = gpu.run("plan_tasks:step", flags=flags, package=package)
    if package == "apex":
        assert "apex" in without["job"]["fused"]
        assert "apex" not in plan["job"]["fused"]
    else:
        assert plan["job"]["attention_kernel"] == package
    assert [s["held"] for s in plan["steps"]] == [s["held"] for s in without["steps"]]
