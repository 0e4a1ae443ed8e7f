"""The tokens that replace others, by themselves (P2.15, P2.16)."""

from types import SimpleNamespace

import numpy as np
import pytest

from megasink.data.replaced_tokens import problems_of, replacement
from megasink.errors import UserError

TOKENIZER = SimpleNamespace(
    all_special_ids=[0, 1], get_vocab=lambda: {letter: i for i, letter in enumerate("<>abcdef")}
)


def make(positions, value, seed=3):
    return replacement(positions, value, seed=seed, tokenizer=TOKENIZER, size=8)


def replaced(made, length, *key):
    sequence = np.full(length, -7, dtype=np.int64)
    made.replace(sequence, *key)
    return sequence.tolist()


def test_a_fixed_token_stands_at_its_positions_and_nowhere_else():
    made = make([2, 0], "5")
    assert replaced(made, 4, 1) == [5, -7, 5, -7]
    assert replaced(made, 2, 1) == [5, -7]  # a sequence too short for the other
    assert replaced(made, 0, 1) == []
    assert made.at(2) == [0]
    assert made.description == "token 5 at positions 0, 2"


def test_random_tokens_depend_on_seed_and_sequence_alone():
    made = make([0, 3], "random")
    whole = replaced(made, 6, 4, 11)
    assert whole[1:3] == [-7, -7]
    assert whole == replaced(make([0, 3], "random"), 6, 4, 11)
    # A position keeps its token whichever others are chosen, and however long the sequence is.
    assert replaced(make([3], "random"), 9, 4, 11)[3] == whole[3]
    many = [tuple(replaced(make([0, 3], "random", seed), 6, d, o)) for seed, d, o in PLACES]
    assert len(set(many)) > 12  # 32 draws of 36 pairs: 21 on average
    # Other numbers would change the data of every run.
    assert [replaced(made, 1, 0, i)[0] for i in range(8)] == GOLDEN


PLACES = [(seed, document, offset) for seed in (3, 4) for document in range(8) for offset in (0, 5)]
GOLDEN = [5, 2, 4, 5, 7, 5, 4, 4]


def test_random_tokens_are_uniform_over_all_but_special_ones():
    made = make([0], "random")
    counts = np.bincount([replaced(made, 1, i)[0] for i in range(6000)], minlength=8)
    assert counts[:2].tolist() == [0, 0]
    # Six tokens: chi-squared with 5 degrees of freedom, 20.5 at one in a thousand.
    assert ((counts[2:] - 1000) ** 2 / 1000).sum() < 20.5


def test_what_the_vocabulary_does_not_have():
    assert problems_of([0, 5], "random") == problems_of(None, None) == []
    assert problems_of(["2"], "5") == ["--replace-tokens-at ['2']: use whole numbers"]
    with pytest.raises(UserError, match=r"--replace-tokens-with 8: the vocabulary has the ids 0 "):
        make([0], "8")
    nothing = SimpleNamespace(all_special_ids=[0], get_vocab=lambda: {"<": 0})
    with pytest.raises(UserError, match="every token of the vocabulary is special"):
        replacement([0], "random", seed=1, tokenizer=nothing, size=1)
    bare = replacement([0], "random", seed=1, tokenizer=None, size=3)
    assert bare.drawn_from_V.tolist() == [0, 1, 2]
