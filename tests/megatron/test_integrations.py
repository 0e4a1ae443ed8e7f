"""The layer spec in other stacks, by the blocks of docs/integrations.md."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megasink.tried import HEART, numbers_of
from tests.distributed.layout import Layout
from tests.distributed.pool import ROOT, free_port
from tests.megatron.tasks import MODEL
from tests.runs import records, steps

PAGE = (ROOT / "docs" / "integrations.md").read_text()
TASKS = "tests.megatron.integration_tasks"
STOCK = Path(__file__).with_name("stock")
# What pretrain_gpt.py needs on a CPU, and megasink's trainer sets by itself.
ON_A_CPU = """--hidden-dropout 0 --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-rope-fusion --no-bias-dropout-fusion --distributed-backend gloo
    --eval-interval 100""".split()
LAYOUTS = {
    "one": "",
    "pp": "--pipeline-model-parallel-size 2",
    "dp": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}


def blocks(heading: str) -> list[str]:
    """The fenced blocks below a heading."""
    (text,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return re.findall(r"^```[a-z ]+\n(.*?)^```$", text, re.M | re.S)


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 150


def test_the_table_has_the_versions_that_a_warning_names():
    rows = [row for row in PAGE.splitlines() if row.startswith("| ")]
    table = rows[rows.index("| stack | version | state on 2026-11-25 |") + 1 :]
    tried = {numbers_of(found) for row in table for found in re.findall(r"0\.\d+\.\d+", row)}
    assert {numbers_of(version) for version in HEART} <= tried


def test_every_form_of_call_gives_the_same_spec(pool):
    for found in pool.run(f"{TASKS}:every_call", Layout(pp=2, vpp=2)):
        stages = [found.pop(f"stage {stage}") for stage in (0, 1)]
        assert {name: spec for name, spec in found.items() if spec is not None} == {}
        assert len(found) == 6
        for cores, mlps, _ in stages:
            assert cores == {"CoreAttention"}
            assert len(mlps) == 1
    assert stages[0][2] != stages[1][2]  # of the last rank: its stages differ


def test_options_come_from_the_first_place_that_has_them(pool):
    (found,) = pool.run(f"{TASKS}:sources", Layout())
    for place in ("config", "arguments", "environment", "environment, twice", "all agree"):
        assert found[place] == 0.5, place
    assert "has no megasink options" in found["none"]
    assert "or set MEGASINK_OPTIONS" in found["none"]
    conflict = "head_balance_coeff is 0.25 in {}, but 0.5 in the config"
    variable, argument = "MEGASINK_OPTIONS", "args.megasink_options"
    assert conflict.format(variable) in found["config, environment"]
    assert conflict.format(argument) in found["config, arguments"]
    assert conflict.format(variable) in found["arguments, environment"]
    assert found["no JSON"].startswith("MEGASINK_OPTIONS is not JSON")
    must = "{} must map option names to values, got {}"
    assert must.format(variable, "['sink']") in found["no object"]
    assert must.format(argument, "'sink'") in found["no dict"]
    assert found["unknown"] == "attention_varient is not a megasink option"
    assert "head_balance_coeff is '0.5', not a float" in found["text"]
    assert "sink_token is 1, not a bool" in found["text"]
    assert all("\n" not in found[case] for case in ("none", "no JSON", "config, environment"))


def test_a_config_that_is_not_ours_ends_in_one_line(pool):
    (found,) = pool.run(f"{TASKS}:not_ours", Layout())
    for case in ("arguments alone", "arguments, config"):
        assert found[case].startswith("layer_spec needs a TransformerConfig")
        assert "not a Namespace: " in found[case]
        assert "layer_spec(config)" in found[case]
    assert found["stack"].startswith("stack_spec needs a TransformerConfig")
    assert "HybridModelConfig builds a hybrid: use stack_spec" in found["hybrid"]
    assert "multi_latent_attention" in found["MLA"]
    assert "GPTModelBuilder ignores the spec in layers of multi-token" in found["prediction"]
    # A copy has no HeadBalance; its options are in the environment here, and those of the first
    # config are its own.
    assert "head_balance" not in found["a copy"]


CHECK = """
counter = model.decoder.layers[2].self_attention.core_attention.head_counter
assert balance.last_number == 2 and counter.coefficients.abs().max() > 0
torch.distributed.destroy_process_group()
"""


def test_the_bare_block_runs_as_it_stands_on_a_cpu():
    """In a process of its own, without our CPU platform and patches."""
    (block,) = blocks("Bare Megatron")
    command = [sys.executable, "-W", "ignore", "-c", block + CHECK]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0].isdigit()] == [*"012"]


def pretrain(folder, block, flags, options, ranks, name="pretrain_gpt.py"):
    """Run the block in a folder with a script of Megatron-LM, on CPU ranks; return its steps."""
    checkout = os.environ.get("MEGASINK_TEST_MEGATRON_LM")
    script = Path(checkout or STOCK, name)
    assert "--nproc-per-node 8" in block
    block = block.replace("--nproc-per-node 8", f"--nproc-per-node {ranks} --master-port $PORT")
    block = block.replace("pretrain_gpt.py", shlex.quote(str(script)))
    export = re.compile(r"^export MEGASINK_OPTIONS=.*$", re.M)
    assert len(export.findall(block)) == 1
    block = export.sub(f"export MEGASINK_OPTIONS={shlex.quote(json.dumps(options))}", block)
    path = [str(STOCK), *([checkout] if checkout else []), str(ROOT)]
    flags = [*flags, *ON_A_CPU, "--tensorboard-dir", str(folder / "board")]
    environment = os.environ | {
        "FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PORT": str(free_port()),
        "RECORD": str(folder / "record"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-eu", "-c", block], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    losses, norms = ([e.value for e in events.Scalars(name)] for name in ("lm loss", "grad-norm"))
    lines = records(folder / f"record-{ranks - 1}")
    for rank in range(ranks - 1):  # every rank has the numbers of all
        assert records(folder / f"record-{rank}") == lines
    return [
        line | {"lm_loss": loss, "grad_norm": norm}
        for line, loss, norm in zip(lines, losses, norms, strict=True)
    ]


@pytest.mark.parametrize(
    ("variant", "scope", "where"),
    [
        ("sink", "global", "one"),
        ("sink", "global", "pp"),
        pytest.param("gated", "microbatch", "one", marks=pytest.mark.later),
        pytest.param("vanilla", "data-parallel", "one", marks=pytest.mark.later),
        pytest.param("gated", "data-parallel", "dp", marks=pytest.mark.later),
    ],
)
def test_pretrain_gpt_has_the_numbers_of_our_trainer(pool, tmp_path, variant, scope, where):
    """From a checkpoint of its GPT model, on the same data: loss, gradient, importances."""
    (block,) = blocks("Megatron-LM")
    options = {"attention_variant": variant, "head_balance_coeff": 1e3, "head_balance_scope": scope}
    ours = [word for k, v in options.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    # Without rows of padding, which only our trainer takes out of the softmax.
    flags = [*MODEL, "--make-vocab-size-divisible-by", "64", *LAYOUTS[where].split()]
    ranks = 1 if where == "one" else 2
    first, second, saved = (tmp_path / name for name in ("first", "second", "saved"))
    first.mkdir()
    made = ["--train-iters", "1", "--save", str(saved), "--save-interval", "1"]
    pretrain(first, block, [*flags, *made], options, ranks)
    start = ["--load", str(saved), "--finetune", "--train-iters", "4"]
    pool.train([*flags, *ours, *start, "--run-dir", str(second)], ranks)
    found = pretrain(tmp_path, block, [*flags, *start], options, ranks)
    wanted = steps(second)
    assert len(found) == len(wanted) == 4
    for mine, line in zip(found, wanted, strict=True):
        assert mine["patches"] == ["platform"]  # those of a CPU: none that fixes Megatron
        for name in ("lm_loss", "grad_norm"):
            assert mine[name] == pytest.approx(line[name], rel=2e-5), name
        # As in test_bare_loop.py: what the rounding of the importances, 2^-24, makes of the loss.
        loss, heads = line["balance_loss"], sum(map(len, line["importance"]))
        rounded = 2 * (loss * options["head_balance_coeff"] * heads) ** 0.5 * 2**-24
        assert mine["balance_loss"] == pytest.approx(loss, rel=2e-5, abs=2 * rounded)
        for row, given in zip(mine["importance"], line["importance"], strict=True):
            assert row == pytest.approx(given, rel=1e-5)


@pytest.mark.parametrize(
    ("script", "variant"),
    [
        ("pretrain_gpt.py", "sink"),
        ("pretrain_gpt.py", "k-bias"),
        pytest.param("pretrain_hybrid.py", "sink", marks=pytest.mark.later),
    ],
)
def test_a_script_saves_a_bf16_model_and_resumes_to_the_bit(tmp_path, script, variant):
    (block,) = blocks("Megatron-LM")
    if script == "pretrain_hybrid.py":
        block = block.replace(" layer_spec ", " stack_spec --hybrid-layer-pattern *-*- ")
    options = {"attention_variant": variant, "head_balance_coeff": 1e3}
    flags = [*MODEL, "--bf16", "--train-iters", "4", "--save", str(tmp_path / "saved")]
    flags += ["--save-interval", "2", "--make-vocab-size-divisible-by", "64"]
    runs = []
    for name, more in (("first", []), ("again", ["--load", str(tmp_path / "saved")])):
        (tmp_path / name).mkdir()
        runs.append(pretrain(tmp_path / name, block, [*flags, *more], options, 1, script))
        latest = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
        assert latest.read_text() == "4"
        latest.write_text("2")
    whole, rest = runs
    assert len(whole) == 4
    assert rest == whole[2:]
    assert {tuple(line["patches"]) for line in whole} == {("platform",)}


# The op alone: its tensors, and each block against plain float64.
def inputs(dtype=torch.float64, groups=2):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 24, 16), (2, groups, 24, 16), (2, groups, 24, 16))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) * 2 for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def plain(query, key, value, causal=True):
    """Output and LSE by a matrix of scores, in the dtype of the tensors."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def run_block(number, tensors, **more):
    query, key, value = tensors
    names = {"query_BHTD": query, "key_BGSD": key, "value_BGSD": value, **more}
    exec(blocks("The op alone")[number], names)
    return names


def z_loss(lse, out):
    return {"z_loss": 1e-4 * lse.square().mean()}


def norm(lse, out):
    seen = torch.arange(1, lse.shape[-1] + 1, dtype=lse.dtype).log()
    return {"norm_BH": (lse - seen).square().sum(-1).sqrt()}


def merged(lse, out):
    return {"out_BHTD": out}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("number", "use"), enumerate([z_loss, norm, merged]))
def test_a_use_of_the_op_is_the_plain_computation(number, use, dtype):
    mine, exact = inputs(dtype), inputs()
    chunks = None
    if use is merged:
        cuts = (5, 1, 18)
        chunks = list(zip(*(tensor.split(cuts, 2) for tensor in mine[1:]), strict=True))
    found = run_block(number, mine, chunks=chunks)
    out, lse = plain(*exact, causal=use is not merged)
    ((name, wanted),) = use(lse, out).items()
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(found[name].double(), wanted, rtol=tolerance, atol=tolerance)
    # A gradient through the output as well, and one that is no constant.
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
    for result, attended in ((found[name], found["out_BHTD"]), (wanted, out)):
        (result.double().square().sum() + (attended.double() * weights).sum()).backward()
    for tensor, reference in zip(mine, exact, strict=True):
        assert reference.grad.abs().max() > 1e-3
        error = (tensor.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < tolerance
