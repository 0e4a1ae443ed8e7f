"""Resuming the trainer: the same layout to the bit, another layout to rounding.

By RUN/metrics.jsonl. One run of six steps with a checkpoint at three is the run that never
stopped; a copy of it that has lost everything after step 3 is the run that was interrupted.
"""

import shutil

import pytest

from tests import runs
from tests.distributed.pool import free_port
from tests.forkserver import server

FLAGS = [*runs.TINY, *runs.UNTIED, *runs.MOCK]
FLAGS += """
    --group-query-attention --num-query-groups 2 --global-batch-size 8 --train-iters 6
    --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0
    --init-method-std 0.2 --vocab-size 300 --save-interval 3 --use-distributed-optimizer
    --head-balance-coeff 0.1 --softmax-offset-init 2.0 --sink-lr-mult 3 --sink-weight-decay 0.05
""".split()
# 300 tokens: Megatron itself would give the model 512 rows under TP=2 and 384 otherwise.
TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
CP = ["--context-parallel-size", "2"]
PP = ["--pipeline-model-parallel-size", "2"]
COMPARED = ("lm_loss", "grad_norm", "balance_loss", "imbalance", "importance", "learning_rate")


@pytest.fixture(scope="module")
def train(pool):
    """Run the trainer in the workers."""

    def run(ranks: int, *flags: str) -> None:
        pool.train([*FLAGS, *flags], ranks)

    return run


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory):
    """A run of six steps under TP=2 with sequence parallelism; its checkpoints are asynchronous."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(2, *TP, "--run-dir", str(run), "--async-save")
    return run


@pytest.fixture
def interrupted(finished, tmp_path):
    """The same run, as if it had been killed after step 5."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints/iter_0000006")
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    # Killed while it wrote the line of step 5.
    metrics.write_text("".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    return run


def steps(run) -> dict[int, dict]:
    """{iteration: its line}; an iteration that is logged twice is an error."""
    trained = runs.steps(run)
    assert [line["iteration"] for line in trained] == [1, 2, 3, 4, 5, 6]
    return {line["iteration"]: line for line in trained}


def test_the_same_layout_resumes_to_the_bit(finished, interrupted):
    # New processes, started as a user starts them.
    command = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command += ["-m", "megasink.training", *FLAGS, *TP, "--run-dir", str(interrupted), "--resume"]
    done = server().run(command, tree=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = steps(finished), steps(interrupted)
    for iteration in before:
        for key in COMPARED:
            assert after[iteration][key] == before[iteration][key], (iteration, key)
    assert len({line["lm_loss"] for line in after.values()}) == 6  # it trains
    assert runs.resumed_from(interrupted) == [None, 3]


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, PP), (2, CP), (1, [])], ids=["pp2", "cp2", "single"]
)
def test_another_layout_resumes_within_rounding(train, finished, interrupted, ranks, layout):
    train(ranks, *layout, "--run-dir", str(interrupted), "--resume")
    before, after = steps(finished), steps(interrupted)
    for iteration in (4, 5, 6):
        for key in ("lm_loss", "grad_norm", "balance_loss", "imbalance"):
            wanted = pytest.approx(before[iteration][key], rel=1e-5)
            assert after[iteration][key] == wanted, (iteration, key)
