"""The sink token: the shift by itself, then in the batches of the real trainer in each layout."""

import numpy as np
import pytest
import torch

from megasink.training.build_datasets import with_sink_token
from tests.distributed.pool import Pool, free_port
from tests.runs import MOCK, TINY, UNTIED, metrics

FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += """
    --seq-length 16 --max-position-embeddings 16 --train-iters 3 --init-method-std 0.2
    --vocab-size 127 --eval-interval 3 --attention-variant k-bias --sink-token
""".split()
TOKEN = 127  # the tokens of NullTokenizer come before it
# One rank last: a process that has trained once takes part in one more collective when it starts
# again (megatron/training/training.py:1131), and rank 1 would not have.
LAYOUTS = {
    "tp2": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "single": (1, []),
}


def test_the_shift():
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    labels = torch.tensor([[2, 3, 4, 9], [6, 7, 8, 9]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
    found = with_sink_token(batch | {"attention_mask": None}, 99)
    assert found["tokens"].tolist() == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert found["labels"][:, 1:].tolist() == [[2, 3, 4], [6, 7, 8]]
    assert found["loss_mask"].tolist() == [[0, 1, 0, 1], [0, 1, 1, 1]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 1]]
    assert found["attention_mask"] is None
    assert tokens[0, 0] == 1  # the data set's own batch is left alone
    assert with_sink_token(dict.fromkeys(batch), 99) == dict.fromkeys(batch)


@pytest.fixture(scope="module")
def pool():
    """Workers of its own: a run with a tokenizer leaves state that others must not meet."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory):
    """{layout: (what each rank's model was given first, the lines of metrics.jsonl)}."""
    found = {}
    for name, (ranks, flags) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name) / "run"
        reports = pool.run(
            "tests.training.tasks:train_and_record",
            flags=[*FLAGS, *flags, "--run-dir", str(folder)],
            ranks=ranks,
            port=free_port(),
        )
        found[name] = (reports[:ranks], metrics(folder))
    return found


def test_every_sequence_of_the_trainer_starts_with_it(runs):
    ((single,), _) = runs["single"]
    assert (single["tokens"][:, 0] == TOKEN).all()
    assert (single["tokens"][:, 1:] < TOKEN).all()
    assert (single["loss_mask"][:, 0] == 0).all()
    assert (single["loss_mask"][:, 1:] == 1).all()
    assert single["position_ids"].tolist() == [list(range(16))] * 2
    # The text follows: the target of each token is the next one.
    np.testing.assert_array_equal(single["labels"][:, 1:-1], single["tokens"][:, 2:])
    (first, second), _ = runs["pp2"]
    assert first["labels"] is None
    assert second["tokens"] is None
    for rank in runs["tp2"][0]:
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(rank[key], single[key])
    for key, stage in (("tokens", first), ("labels", second), ("loss_mask", second)):
        np.testing.assert_array_equal(stage[key], single[key])


def test_its_row_is_learned_and_its_target_is_not_counted(runs):
    ((single,), _) = runs["single"]
    assert single["rows"] == 128
    assert single["sink_row_moved"] > 1e-3  # about three steps of the learning rate
    assert single["targets"] == 2 * 15


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_layout_changes_nothing(runs, layout):
    for found, wanted in zip(runs[layout][1], runs["single"][1], strict=True):
        for key in {"lm_loss", "grad_norm", "valid_lm_loss"} & wanted.keys():
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
