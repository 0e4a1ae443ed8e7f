"""Three steps of the trainer as a rank of each layout: what the host does to the device in one.

Every mechanism and every layout is here, not every pair of them. Values are 0 where a kernel would
have written them, so no number is tested.
"""

import shlex

import pytest

from tests.plan.hollow.allowed import unexpected

MODEL = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --bf16 --head-balance-coeff 1e-3 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--num-workers 0 --eval-iters 0 --eval-interval 100"
)
GROUPS = "--group-query-attention --num-query-groups 2"
GATED, ELEMENTWISE = "--attention-variant gated", "--gate-granularity elementwise"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type allgather"
ALLTOALL = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PACKED = "--dataloader-inter-document-masking"
TP, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
PP, CP = "--pipeline-model-parallel-size", "--context-parallel-size 2"
VPP = "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2"

# name: (flags, rank, ranks)
CASES = {
    "vanilla": ("--attention-variant vanilla", 0, 1),
    "sink-groups": (f"--attention-variant sink {GROUPS}", 0, 1),
    "off-by-one-window": ("--attention-variant off-by-one --window-size 63,0", 0, 1),
    "k-bias": ("--attention-variant k-bias", 0, 1),
    "kv-bias-window": ("--attention-variant kv-bias --window-size 63,0", 0, 1),
    "v-bias": ("--attention-variant v-bias", 0, 1),
    "headwise": (GATED, 0, 1),
    "headwise-bias": (f"{GATED} --add-qkv-bias --qk-layernorm {GROUPS}", 0, 1),
    "elementwise": (f"{GATED} {ELEMENTWISE}", 0, 1),
    "elementwise-shared": (f"{GATED} {ELEMENTWISE} --gate-shared-heads", 0, 1),
    "value-gate": (f"{GATED} --gate-position value", 0, 1),
    "output-gate": (f"{GATED} {ELEMENTWISE} --gate-position output", 0, 1),
    "gate-parameter-norm": (f"{GATED} --gate-input none --sdpa-output-norm rmsnorm", 0, 1),
    "switch": ("--switch-heads key-value --switch-experts 4 --switch-top-k 2", 0, 1),
    "no-balance-loss": ("--attention-variant sink --head-balance-coeff 0", 0, 1),
    "shared-heads": ("--head-balance-shared-heads 1", 0, 1),
    "microbatch-scope": ("--head-balance-scope microbatch", 0, 1),
    "packed": (PACKED, 0, 1),
    "packed-vanilla": (f"{PACKED} --attention-variant vanilla --head-balance-coeff 0", 0, 1),
    "packed-tensor": (f"{PACKED} {TP}", 1, 2),
    "packed-context": (f"{PACKED} {CP}", 1, 2),
    "packed-context-heads": (f"{PACKED} {CP} --cp-comm-type a2a {TP} {SP}", 3, 4),
    "observed": ("--log-interval 1", 0, 1),
    "recompute": (f"{FULL} {GATED}", 0, 1),
    "tensor": (f"{TP} {GATED}", 0, 2),
    "tensor-sequence": (f"{TP} {SP} {GATED} {GROUPS}", 1, 2),
    "pipeline-first": (f"{PP} 2 --attention-variant vanilla", 0, 2),
    "pipeline-last": (f"{PP} 2 {GATED}", 1, 2),
    "pipeline-middle": (f"{PP} 4 --num-layers 4", 1, 4),
    "interleaved-first": (f"{PP} 2 {VPP} --global-batch-size 8", 0, 2),
    "interleaved-last": (f"{PP} 2 {VPP} {GATED} {ELEMENTWISE}", 1, 2),
    "context": (f"{CP} {GATED}", 0, 2),
    "context-heads": (f"{CP} --cp-comm-type a2a", 1, 2),
    "data": ("--head-balance-scope data-parallel --global-batch-size 16", 2, 4),
    "experts": (f"{EXPERTS} --expert-model-parallel-size 2", 1, 2),
    "all-first": (f"{TP} {SP} {PP} 2 {CP} {FULL} --global-batch-size 16", 0, 32),
    "all-last": (f"{TP} {SP} {PP} 2 {CP} {GATED} --global-batch-size 16", 31, 32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step(gpu, name):
    flags, rank, ranks = CASES[name]
    flags = shlex.split(f"{MODEL} {flags}")
    found = gpu.run("trainer_tasks:step", flags=flags, rank=rank, ranks=ranks)
    assert unexpected(found, flags) == []
    assert found["misplaced"] == []


@pytest.mark.parametrize(("tensor", "rank", "ranks"), [("", 1, 2), (f"{TP} {SP}", 3, 4)])
def test_tokens_go_to_their_experts(gpu, tensor, rank, ranks):
    """With alltoall the host sizes the exchange by counts that it waits for, once in each layer."""
    flags = shlex.split(f"{MODEL} {ALLTOALL} --expert-model-parallel-size 2 {tensor}")
    found = gpu.run("trainer_tasks:step", flags=flags, rank=rank, ranks=ranks)
    assert unexpected(found, flags) == []
    assert found["misplaced"] == []
    layers, tokens, top_k, hidden, peers = 2, 512 * 2 // ranks, 2, 256, 2
    of_peer = tokens * top_k // peers
    sent = {size: count for name, size, _, count in found["collectives"] if name == "ncclSend"}
    # Tokens there and back, probabilities only there; bf16; forward and backward.
    exchanges = layers * 2 * peers
    assert sent == {of_peer * hidden * 2: 2 * exchanges, of_peer * 2: exchanges}


def test_the_gradient_norm_is_read_once(gpu):
    """Without the fix of megasink/upstream/fixes.py once for each parameter."""
    found = gpu.run("trainer_tasks:step", flags=shlex.split(MODEL))
    norms = [count for what, module, _, count in found["waits"] if module.endswith(".clip_grads")]
    assert norms == [1]
    assert not any(module == "megatron.core.utils" for _, module, _, _ in found["waits"])


def test_deterministic_mode_fills_no_new_tensor(gpu):
    """torch fills each of them, which took 795 launches a step and not 427."""
    plain, deterministic = (
        gpu.run("trainer_tasks:step", flags=shlex.split(f"{MODEL} {flags}"))["counts"]["launch"]
        for flags in ("", "--deterministic-mode")
    )
    assert deterministic <= 1.1 * plain


# Launches in forward and backward of one microbatch and layer, its part of the optimizer included;
# with Triton gate kernels, without TransformerEngine and torch.compile.
LAUNCHES = {
    "--attention-variant vanilla --head-balance-coeff 0": 90,
    "--attention-variant vanilla": 93,
    # A sink or bias in bf16 takes three: widened, its gradient narrowed, and the copy of its main
    # weight, which TransformerEngine and apex make with those of all parameters.
    "--attention-variant sink --head-balance-coeff 0": 86,
    "--attention-variant sink": 89,
    "--attention-variant kv-bias": 106,
    GATED: 85,
    f"{GATED} {ELEMENTWISE}": 84,
}


@pytest.mark.parametrize("flags", LAUNCHES)
def test_what_a_layer_costs(gpu, flags):
    """Kernels, and bytes: what two layers more take."""
    flags_, layers, tokens, hidden = shlex.split(f"{MODEL} {flags}"), (2, 4), 2 * 256, 256
    flags_ += ["--global-batch-size", "2"]
    few, many = (
        gpu.run("trainer_tasks:step", flags=[*flags_, "--num-layers", str(n)]) for n in layers
    )
    more = layers[1] - layers[0]
    assert (many["counts"]["launch"] - few["counts"]["launch"]) / more <= LAUNCHES[flags]

    # bf16 weight 2, fp32 gradient 4, and over the data-parallel ranks (one here) fp32 weight 4 and
    # two moments 8. The rest is one batch, and tables of RoPE.
    for found in (few, many):
        assert found["before"] == pytest.approx(18 * found["parameters"], rel=5e-3)

    # Kept for backward, in bf16: both norms' inputs and outputs, v, q and k behind RoPE, the output
    # of attention, linear_fc1's two halves and their product; two dropout masks, bytes.
    # Behind a gate the output too; an elementwise gate has its scores.
    ffn = 640  # 8/3 of the width, to a multiple of 64
    kept = 2 * (7 * hidden + 3 * ffn) + 2 * hidden
    kept += 4 * hidden if "elementwise" in flags else 2 * hidden if GATED in flags else 0
    activations = (many["peak"] - many["before"] - few["peak"] + few["before"]) / more
    assert activations == pytest.approx(kept * tokens, rel=0.05)
