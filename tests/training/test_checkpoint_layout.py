"""The form of the optimizer's state in checkpoints, chosen by the memory of hosts."""

import shutil

import pytest

from megasink.training.checks.host_memory import CHECKPOINT_BYTES
from tests import runs
from tests.distributed.pool import TaskFailed, free_port

FLAGS = [*runs.TINY, *runs.UNTIED, *runs.MOCK]
FLAGS += """
    --hidden-size 256 --num-layers 4 --global-batch-size 8 --train-iters 4 --save-interval 2
    --use-distributed-optimizer --head-balance-coeff 0.1 --bf16
""".split()
TP = ["--tensor-model-parallel-size", "2"]
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
LARGE, SMALL = 1e12, 1e6


@pytest.fixture(scope="module")
def train(pool, tmp_path_factory):
    """Train on hosts of so much memory: bytes for a parameter that a save and a load take."""

    def run(folder, memory, *flags, ranks=2):
        given = {"flags": [*FLAGS, "--run-dir", str(folder), *flags], "port": free_port()}
        task = "tests.training.tasks:train_and_weigh"
        return pool.run(task, ranks=ranks, available=memory, **given)[:ranks]

    return run


@pytest.fixture(scope="module")
def sharded(train, tmp_path_factory):
    run = tmp_path_factory.mktemp("sharded") / "run"
    return run, train(run, SMALL)


def after_step_2(run, copy):
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints/iter_0000004")
    (copy / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    return copy


def losses(run):
    return [(line["lm_loss"], line["grad_norm"]) for line in runs.steps(run)]


def test_where_gathering_would_not_fit_shards_are_saved(train, sharded, tmp_path):
    run, weights = sharded
    gathered = train(tmp_path / "gathered", LARGE)
    assert losses(tmp_path / "gathered") == losses(run)
    for small, large in zip(weights, gathered, strict=True):
        assert 12 < large["save"] < 1.3 * CHECKPOINT_BYTES
        assert small["save"] < large["save"] - 6
    again = after_step_2(run, tmp_path / "again")
    assert all(rank["load"] < 12 for rank in train(again, SMALL, "--resume"))
    assert losses(again) == losses(run)  # to the bit


def test_shards_load_on_fewer_ranks(train, sharded, tmp_path):
    one = after_step_2(sharded[0], tmp_path / "one")
    train(one, SMALL, "--resume", ranks=1)
    for found, wanted in zip(losses(one), losses(sharded[0]), strict=True):
        assert found == pytest.approx(wanted, rel=1e-2)  # bf16 sums in another order


def test_shards_load_under_another_layout_after_one_more_checkpoint(train, sharded, tmp_path):
    run = after_step_2(sharded[0], tmp_path / "run")
    with pytest.raises(
        TaskFailed, match=f"only the data-parallel size may change: .* {RESHARDABLE} .* --no-load"
    ):
        train(run, LARGE, "--resume", *TP)
    train(run, SMALL, "--resume", RESHARDABLE)
    other = after_step_2(run, tmp_path / "other")
    shutil.copytree(run / "checkpoints/iter_0000004", other / "checkpoints/iter_0000004")
    (other / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    more = ["--train-iters", "5", "--override-opt-param-scheduler", "--resume"]
    train(run, LARGE, *more)
    train(other, SMALL, *more, *TP)
    assert losses(other)[-1] == pytest.approx(losses(run)[-1], rel=1e-2)
