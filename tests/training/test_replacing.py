"""Replaced tokens in the samples of the trainer, in its evaluations, and in what reads its run."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megasink.data.replaced_tokens import replacement
from megasink.training.checked_dataset import replace_in_sample, text_targets
from tests.distributed.layout import SINGLE
from tests.runs import TINY, UNTIED, metrics, short_documents

LENGTH = 12


def test_sequences_of_a_sample():
    made = replacement([0, 2], "9", seed=1, tokenizer=None, size=10)
    documents, lengths = [7, 3, 5], [4, 2, 3]
    one, many = np.arange(100, 110), np.arange(100, 110)  # the last one is padding
    replace_in_sample(made, one, documents, lengths, 6, packed=False)
    assert one.tolist() == [9, 101, 9, 103, 104, 105, 106, 107, 108, 109]
    replace_in_sample(made, many, documents, lengths, 6, packed=True)
    assert many.tolist() == [9, 101, 9, 103, 9, 105, 9, 107, 9, 109]
    # The beginning of a document has the same random token in every sample, its middle another.
    drawn = replacement([0], "random", seed=1, tokenizer=None, size=10**6)
    first, second = np.zeros((2, 6), dtype=np.int64)
    replace_in_sample(drawn, first, [4, 8], [3, 3], 0, packed=True)
    replace_in_sample(drawn, second, [8, 4], [3, 3], 5, packed=True)
    assert first[0] == second[3]
    assert first[3] != second[0]


@pytest.mark.parametrize("positions", [[0], [1], [0, 3], [2, LENGTH - 1]])
def test_which_targets_are_text(positions):
    """Against the definition, on documents of random lengths."""
    random = np.random.default_rng(0)
    made = replacement(positions, "1", seed=0, tokenizer=None, size=2)
    inside = [sorted({0, LENGTH, *random.integers(1, LENGTH, 3)}) for _ in range(20)]
    rows = torch.tensor([[*b, *[LENGTH] * (LENGTH + 2 - len(b))] for b in inside]).int()
    found = text_targets(positions, torch.zeros(20, LENGTH), rows, sink_token=False)
    for row, bounds in zip(found, inside, strict=True):
        wanted = np.ones(LENGTH, dtype=bool)
        for start, stop in pairwise(bounds):
            # The document goes on behind the sample if it is the last one.
            end = stop + 1 if stop == LENGTH else stop
            for position in made.at(end - start):
                if start + position:
                    wanted[start + position - 1] = False
        wanted[-1] &= 0 not in positions  # another document may begin there
        assert row.tolist() == wanted.tolist()
    whole = text_targets(positions, torch.zeros(2, LENGTH), None, sink_token=False)
    assert whole.tolist() == [[i + 1 not in positions for i in range(LENGTH)]] * 2
    shifted = text_targets(positions, torch.zeros(2, LENGTH), None, sink_token=True)
    assert shifted.tolist() == [[i not in positions for i in range(LENGTH)]] * 2


FLAGS = [*TINY, *UNTIED, "--device", "cpu"]
FLAGS += """
    --train-iters 4 --lr-decay-iters 4 --split 80,20,0 --eval-interval 2 --eval-iters 1
    --save-interval 2 --dataloader-inter-document-masking --num-workers 0
    --replace-tokens-at 0 2 --replace-tokens-with random
""".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return short_documents(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def run(pool, text, tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("replaced") / "run"
    pool.train([*FLAGS, *text, "--run-dir", str(folder)])
    return folder


def losses(folder):
    lines = metrics(folder)
    found = [line["lm_loss"] for line in lines if "lm_loss" in line]
    keys = ("valid_lm_loss", "valid_bits_per_byte")
    return found, [[line[key] for key in keys] for line in lines if keys[0] in line]


def test_a_resumed_run_has_the_same_tokens(pool, run, text, tmp_path):
    """Two steps, then two more: the losses of a run of four."""
    flags = [*FLAGS, *text, "--run-dir", str(tmp_path / "run")]
    pool.train([*flags, "--train-iters", "2"])
    pool.train([*flags, "--resume", "--override-opt-param-scheduler"])
    (found, evaluations), (wanted, wanted_evaluations) = losses(tmp_path / "run"), losses(run)
    assert found == wanted
    assert evaluations[-1] == wanted_evaluations[-1]


def test_analyses_of_the_run_do_the_same(pool, run, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(400))))
    base = [str(run), "--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    base += ["--device", "cpu", "--seq-length", "16", "--max-samples", "2"]
    flags = {
        "as trained": [],
        "given": ["--replace-tokens-at", "2", "0", "--replace-tokens-with", "random"],
        "fixed": ["--replace-tokens-at", "1", "--replace-tokens-with", "7"],
        "kept": ["--replace-tokens-at", "none"],
    }
    lines = [[*base, *more] for more in flags.values()]
    (found,) = pool.run("tests.training.tasks:analyzed_samples", SINGLE, command_lines=lines)
    found = dict(zip(flags, found, strict=True))
    note = "megasink: every sequence has random tokens at positions 0, 2, as in training"
    assert [note in case["said"] for case in found.values()] == [True, False, False, False]
    assert {name: (c["positions"], c["with"]) for name, c in found.items()} == {
        "as trained": ([0, 2], "random"),
        "given": ([0, 2], "random"),
        "fixed": ([1], "7"),
        "kept": (None, None),
    }
    text = np.array(found["kept"]["tokens"])
    assert text.shape == (2, 16)
    assert found["given"]["tokens"] == found["as trained"]["tokens"]
    drawn, fixed = np.array(found["given"]["tokens"]), np.array(found["fixed"]["tokens"])
    np.testing.assert_array_equal(np.delete(drawn, [0, 2], 1), np.delete(text, [0, 2], 1))
    assert (drawn[:, [0, 2]] != text[:, [0, 2]]).any()
    np.testing.assert_array_equal(np.delete(fixed, 1, 1), np.delete(text, 1, 1))
    assert fixed[:, 1].tolist() == [7, 7]
    assert found["given"]["replaced"] == [(16, 14)] * 2  # counted from the end
    assert found["kept"]["replaced"] == [()] * 2
