"""Evaluations are of the same samples, whatever came before, and every step has one."""

import shutil

import pytest

from tests.distributed.layout import SINGLE
from tests.runs import TINY, metrics

FLAGS = [*TINY]
FLAGS += """
    --num-layers 1 --hidden-size 32 --num-attention-heads 2 --train-iters 4
    --lr-decay-style constant --init-method-std 0.2 --hidden-dropout 0.2
    --tokenizer-type NullTokenizer --vocab-size 100 --split 60,20,20 --eval-iters 2
    --eval-interval 1 --save-interval 2 --num-workers 0
""".split()
# An evaluation reads 8 of the 18 samples that the validation part has.


@pytest.fixture(scope="module")
def prefix(pool, tmp_path_factory):
    prefix = str(tmp_path_factory.mktemp("data") / "tokens")
    sizes = {"documents": 30, "length": 97, "tokens": 99}
    pool.run("tests.training.observing_tasks:write_tokens", SINGLE, prefix=prefix, **sizes)
    return prefix


@pytest.fixture(scope="module")
def train(pool, prefix):
    def run(folder, *flags):
        flags = [*FLAGS, "--data-path", prefix, "--run-dir", str(folder), *flags]
        pool.train(flags, 2)
        return lines(folder)

    return run


@pytest.fixture(scope="module")
def moving(train, tmp_path_factory):
    """A run of four steps with dropout, and its lines."""
    folder = tmp_path_factory.mktemp("moving") / "run"
    return folder, train(folder, "--lr", "1e-2")


def lines(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in metrics(folder)]


def values(found, name="valid_lm_loss"):
    return {line["iteration"]: line[name] for line in found if name in line}


def after_step_2(folder, copy):
    """A copy of a run that was killed after step 2."""
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "checkpoints" / "iter_0000004")
    (copy / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    return copy


def test_the_same_weights_have_the_same_value(train, tmp_path):
    still = "--lr 0 --min-lr 0 --weight-decay 0".split()
    found = train(tmp_path / "still", *still)
    assert [line["iteration"] for line in found if "valid_lm_loss" in line] == [1, 2, 3, 4]
    assert len(set(values(found).values())) == 1
    assert len(set(values(found, "lm_loss").values())) == 4  # of other samples each
    assert len(values(found, "test_lm_loss")) == 1
    # In other places of other batches.
    layout = ["--tensor-model-parallel-size", "2", "--micro-batch-size", "1"]
    layout += ["--eval-interval", "3"]
    other = train(tmp_path / "tp2", *still, *layout)
    for name in ("valid_lm_loss", "test_lm_loss"):
        wanted, again = values(found, name), values(other, name)
        assert again == pytest.approx(dict.fromkeys(again, wanted[4]), rel=1e-6)
    assert list(values(other)) == [3, 4]


def test_a_resumed_run_has_the_values_of_one_that_never_stopped(train, moving, tmp_path):
    folder, wanted = moving
    assert len(set(values(wanted).values())) == 4
    assert train(after_step_2(folder, tmp_path / "run"), "--lr", "1e-2", "--resume") == wanted


def test_and_so_has_one_that_is_made_longer(train, moving, tmp_path):
    folder, wanted = moving
    longer = ["--lr", "1e-2", "--resume", "--train-iters", "9", "--eval-interval", "2"]
    longer += ["--override-opt-param-scheduler"]
    found = values(train(after_step_2(folder, tmp_path / "run"), *longer))
    assert found.keys() == {1, 2, 4, 6, 8, 9}
    assert found[4] == values(wanted)[4]


def test_a_run_that_is_at_its_end_has_nothing_new(train, moving, tmp_path):
    folder, wanted = moving
    shutil.copytree(folder, tmp_path / "run")
    assert train(tmp_path / "run", "--lr", "1e-2", "--resume") == wanted
    more = train(tmp_path / "run", "--lr", "1e-2", "--resume", "--eval-iters", "1")
    assert more[: len(wanted)] == wanted
    assert {line["iteration"] for line in more[len(wanted) :]} == {4}
    assert len(more) == len(wanted) + 2  # of other samples


@pytest.mark.parametrize(("split", "tested"), [("100,0,0", 0), ("80,0,20", 1)])
def test_a_run_without_validation_data_has_no_validation(train, tmp_path, split, tested):
    """Megatron would evaluate on a data loader that is not there."""
    found = train(tmp_path / "run", "--lr", "1e-2", "--split", split)
    assert [line["iteration"] for line in found if "lm_loss" in line] == [1, 2, 3, 4]
    assert values(found) == {}
    assert len(values(found, "test_lm_loss")) == tested
