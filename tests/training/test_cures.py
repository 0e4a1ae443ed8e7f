"""What pages and messages say to do is done: a table of cures, and one small run of each."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megasink.errors import ConfigError
from megasink.training import run_dir
from megasink.training.resume_flags import replayed
from tests import runs
from tests.distributed.pool import TaskFailed
from tests.mistakes import MISTAKES
from tests.parsing import read, refuse

FLAGS = [*runs.TINY, *runs.UNTIED, *runs.MOCK]
FLAGS += """
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --train-iters 3
    --save-interval 1 --eval-interval 100 --head-balance-coeff 0.1 --sink-lr-mult 3
    --sink-weight-decay 0.05 --embedding-lr 2e-2
""".split()
TP, PP = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
SHARDED = ["--use-distributed-optimizer"]
# Layouts of an optimizer: ranks and flags.
LAYOUTS = {
    "single": (1, []),
    "tp2-sharded": (2, [*TP, "--sequence-parallel", *SHARDED]),
    "dp2-sharded": (2, SHARDED),
    "pp2": (2, PP),
    "pp2-sharded-bf16": (2, [*PP, *SHARDED, "--bf16"]),
    "bf16": (1, ["--bf16"]),
    "experts": (2, [*SHARDED, "--num-experts", "2", "--expert-model-parallel-size", "2"]),
    "muon": (1, ["--optimizer", "muon"]),
    "muon-dp2-sharded": (2, ["--optimizer", "muon", *SHARDED, "--bf16"]),
}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    found = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def copy(run: Path, folder: Path, step: int) -> Path:
    """A copy of a run, as if it had been killed after a checkpoint."""
    shutil.copytree(run, folder)
    for later in (folder / "checkpoints").glob("iter_*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.fixture(scope="module")
def three(pool, tmp_path_factory):
    """A run of three steps, of the plain optimizer."""
    run = tmp_path_factory.mktemp("three") / "run"
    pool.train([*FLAGS, "--run-dir", str(run)])
    return run


OVERRIDE, KEEP = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
# What a resume of three steps with a fourth asks for: flags, the answer without the cure, cures,
# and the learning rate of step 4 with each.
RESUMES = {
    "rate": ("--lr 1e-4 --min-lr 1e-5", f"another schedule .* add {OVERRIDE}", {OVERRIDE: 1e-4}),
    "decay": ("--weight-decay 0.2", "another schedule", {OVERRIDE: 1e-2}),
    "sinks": (f"--sink-lr-mult 0.5 {OVERRIDE}", None, {"": 1e-2}),
    "kept-rate": (
        f"--lr 1e-4 --min-lr 1e-5 {KEEP}",
        "keeps --lr 0.01 and --min-lr 0.001 of the checkpoint: ",
        {"--lr 1e-2 --min-lr 1e-3": 1e-2},
    ),
    "betas": (f"--adam-beta1 0.5 --adam-eps 1e-6 --clip-grad 0.5 {OVERRIDE}", None, {"": 1e-2}),
    "no-sinks": (
        f"--sink-lr-mult 1 --sink-weight-decay 0 {OVERRIDE}",
        "groups the parameters differently .*: pass --sink-lr-mult, .* --no-load-optim",
        {"--sink-lr-mult 3 --sink-weight-decay 0.05": 1e-2, "--no-load-optim": 1e-2},
    ),
    "longer": ("--lr-decay-style linear", "another schedule", {OVERRIDE: 1e-3, KEEP: 1e-2}),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_message_about_the_schedule_names_its_cure(pool, three, tmp_path, case):
    flags, answer, cures = RESUMES[case]
    line = [*FLAGS, *flags.split(), "--train-iters", "4", "--resume", "--run-dir"]
    if answer:
        with pytest.raises(TaskFailed, match=answer):
            pool.train([*line, str(copy(three, tmp_path / "refused", 3))])
    for index, (cure, rate) in enumerate(cures.items()):
        run = copy(three, tmp_path / str(index), 3)
        pool.train([*line, str(run), *cure.split()])
        assert runs.steps(run)[-1]["learning_rate"] == pytest.approx(rate)


# Megatron's own scheduler raises for each only after it has built the model.
LATER = {
    "rate": ("--lr 1e-3", "max_lr 0.01 -> 0.001"),
    "least-rate": ("--min-lr 1e-4", "min_lr 0.001 -> 0.0001"),
    "decay": ("--weight-decay 0.2", "start_wd 0.1 -> 0.2, end_wd 0.1 -> 0.2"),
    "length": ("--train-iters 9", "lr_decay_steps 12 -> 36, wd_incr_steps 12 -> 36"),
    "shape": ("--lr-decay-style linear", "lr_decay_style constant -> linear"),
    "warm-up": ("--lr-warmup-fraction 0.25", "lr_warmup_steps 0 -> 3.0"),
}


@pytest.mark.parametrize("case", LATER)
def test_another_schedule_is_refused_before_a_process_starts(three, case):
    flags, answer = LATER[case]
    for where in (["--resume", "--run-dir", three], ["--load", three / "checkpoints"]):
        line = [*FLAGS, *flags.split(), *map(str, where)]
        (told,) = run_dir.problems(read(line))
        assert f"another schedule ({answer})" in told
        assert [run_dir.problems(read([*line, cure])) for cure in (OVERRIDE, KEEP)] == [[], []]


def test_the_schedule_of_a_run_is_that_of_its_checkpoint(three):
    assert run_dir.problems(read([*FLAGS, "--resume", "--run-dir", str(three)])) == []


def test_betas_are_those_of_the_flags(pool, three, tmp_path):
    """Upstream takes a checkpoint's without a word."""
    run = copy(three, tmp_path / "run", 2)
    pool.train([*FLAGS, "--adam-beta2", "0.9", "--run-dir", str(run), "--resume"])
    before, usual, other = (
        tensors(folder / f"checkpoints/iter_000000{step}")
        for folder, step in ((three, 2), (three, 3), (run, 3))
    )
    name = "optimizer.state.exp_avg_sq.output_layer.weight"
    squares = (usual[name] - 0.999 * before[name]) / 0.001
    torch.testing.assert_close(other[name], 0.9 * before[name] + 0.1 * squares, rtol=1e-3, atol=0)


def test_a_lower_rate_on_the_launchers_line_is_enough():
    def words(given, last="--lr 1e-2 --seed 3"):
        return replayed(last.split(), given.split(), Path("run"))

    assert words("--lr 1e-3") == ["--seed", "3", OVERRIDE]
    assert words("--min-lr 1e-3", f"--lr 1 {KEEP}") == ["--lr", "1", OVERRIDE]
    assert words(f"--lr 1e-3 {KEEP}") == ["--seed", "3"]
    # The same rate, as a scheduler repeats it, and another length: which schedule is meant?
    assert words("--lr 1e-2 --train-iters 9") == ["--seed", "3"]


# Of tests/mistakes.toml: what the answer names, in the place of the flag or behind the line.
CURED = {
    "train-negative": ["--lr 0"],
    "train-zero-heads": ["--num-attention-heads 1"],
    "train-choice": [f"--attention-variant {name}" for name in ("vanilla", "sink", "gated")],
    "train-choice-of-megatron": ["--normalization LayerNorm", "--normalization RMSNorm"],
    "train-data": ["--data-path {0}/tokens"],
    "train-heads": ["--hidden-size 60", "--num-attention-heads 4", "--kv-channels 8"],
    "train-warm-up": ["--lr-warmup-iters 3", "--train-iters 501", "--lr-decay-iters 501"],
    "train-length": ["--seq-length 64", "--max-position-embeddings 128"],
}


@pytest.mark.parametrize("name", CURED)
def test_what_an_answer_names_is_accepted(tmp_path, name):
    for suffix in ("bin", "idx"):
        (tmp_path / f"tokens.{suffix}").touch()
    (tmp_path / "llama").mkdir()
    line = shlex.split(MISTAKES[name][0].replace("{0}", str(tmp_path)))[1:]
    with pytest.raises(ConfigError):
        refuse(line, 1)
    for cure in CURED[name]:
        flag, value = cure.replace("{0}", str(tmp_path)).split()
        kept = line[:-2] if line[-2] == flag else line
        refuse([*kept, flag, value], 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_learning_rate_keeps_the_moments(pool, tmp_path, layout):
    """Step 3 at a hundredth of the rates: the same moments to the bit, a hundredth of the change.

    Its gradients are those of the weights of step 2, at any rate.
    """
    ranks, flags = LAYOUTS[layout]
    run = tmp_path / "run"
    pool.train([*FLAGS, *flags, "--run-dir", str(run)], ranks)
    other = copy(run, tmp_path / "other", 2)
    slower = "--lr 1e-4 --min-lr 1e-5 --embedding-lr 2e-4 --override-opt-param-scheduler"
    pool.train([*FLAGS, *flags, "--run-dir", str(other), "--resume", *slower.split()], ranks)
    assert runs.steps(other)[-1]["learning_rate"] == pytest.approx(1e-4)
    before, fast, slow = (
        tensors(folder / f"checkpoints/iter_000000{step}")
        for folder, step in ((run, 2), (run, 3), (other, 3))
    )
    moments = [n for n in fast if "exp_avg" in n or "momentum" in n]
    assert len(moments) >= 10
    for name in moments:
        assert torch.equal(fast[name], slow[name]), name
        assert not torch.equal(fast[name], before[name]) or not fast[name].any()
    # Of bf16 weights the main ones: of the distributed optimizer, or of the plain one.
    mains = [n for n in fast if n.startswith(("optimizer.state.param.", "optimizer.state.fp32_"))]
    names = mains or [n for n in fast if n.endswith("weight") and "optimizer" not in n]
    assert len(names) >= 8
    for name in names:
        step, small = fast[name] - before[name], slow[name] - before[name]
        assert step.abs().max() > 1e-3, name
        error = (small * 100 - step).abs().max() / step.abs().max()
        assert error < 1e-2, (name, error)
