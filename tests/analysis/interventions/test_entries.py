"""Lists of heads, files of interventions, and interventions on tokens."""

import json

import numpy as np
import pytest

from megasink.analysis.interventions import (
    DrainFirstValue,
    DynamicZeroing,
    RemoveBos,
    RepeatFirstToken,
    SteerGates,
    ZeroHeads,
    heads_of,
    read_heads,
    read_interventions,
    to_entry,
)
from megasink.analysis.interventions.intervention_types import KINDS
from megasink.errors import UserError


def test_words_and_layers():
    for given in (["3.5", "0.12", "3.5"], "3.5 0.12", ((3, 5), "0.12")):
        assert heads_of(given) == (((0, 12), (3, 5)), None)
    for word in ("3", "3.", "a.b", "-1.2", "3.5.1"):
        with pytest.raises(ValueError, match=r"such as 3\.5"):
            heads_of([word])


def test_heads_from_arrays():
    mask_LH = np.array([[False, True], [True, False]])
    assert ZeroHeads(np.argwhere(mask_LH)).heads == ((0, 1), (1, 0))
    assert ZeroHeads([tuple(np.argwhere(mask_LH)[0])]).heads == ((0, 1),)
    for wrong in ([np.array([0.0, 1.0])], [np.array([0, -1])], mask_LH):
        with pytest.raises(ValueError, match=r"is not .layer, head.: use two whole numbers"):
            ZeroHeads(wrong)


@pytest.mark.parametrize(
    ("name", "text", "heads", "shape"),
    [
        ("a.json", '{"heads": [[1, 0], [0, 1]]}', ((0, 1), (1, 0)), None),
        ("a.json", '{"mask": [[0, 1], [1, 0]]}', ((0, 1), (1, 0)), (2, 2)),
        ("a.csv", "layer,head\n1,0\n0,1\n", ((0, 1), (1, 0)), None),
        ("a.csv", "0,1\n1,0\n", ((0, 1), (1, 0)), (2, 2)),
        ("a.csv", "0,0,1\n0,0,0\n", ((0, 2),), (2, 3)),
    ],
)
def test_files_of_heads(tmp_path, name, text, heads, shape):
    (tmp_path / name).write_text(text)
    assert read_heads(tmp_path / name) == (heads, shape)
    zeroing = ZeroHeads(**read_heads(tmp_path / name)._asdict())
    problems = zeroing.problems([3, 3])
    assert bool(problems) == (shape == (2, 2))
    assert all("the mask has 2 layers of 2 heads, but the model has 2 of 3" in p for p in problems)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.json", "[[0, 1]]", "write {"),
        ("a.json", '{"heads": [[0]]}', r"\[0\] is not \[layer, head\]"),
        ("a.json", '{"heads": [[0, -1]]}', "use two whole numbers"),
        ("a.json", '{"heads": [[0, 1.0]]}', "two whole numbers"),
        ("a.json", '{"mask": [[0, 2]]}', "only 0 and 1, not 2"),
        ("a.json", '{"mask": [[0, 1], [1]]}', "all of the same length"),
        ("a.json", "{", "Expecting"),
        ("a.csv", "", "one row for each layer"),
        ("a.csv", "0,x\n", "invalid literal"),
    ],
)
def test_wrong_files_of_heads(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=problem):
        read_heads(tmp_path / name)


def test_every_kind_survives_json(tmp_path):
    made = [
        ZeroHeads([(1, 2), (0, 1)], mask_shape=(2, 4)),
        DynamicZeroing("aeqd_ln", 0.5, seed=3),
        DrainFirstValue(0.75, "decode"),
        SteerGates([(0, 1)], scale=0.5, maximum=0.9),
        RemoveBos(),
        RepeatFirstToken(3),
    ]
    assert {type(intervention) for intervention in made} == set(KINDS.values())
    path = tmp_path / "interventions.json"
    path.write_text(json.dumps([to_entry(intervention) for intervention in made]))
    assert read_interventions(path) == made
    for entry, problem in (
        ({"kind": ["zero-heads"]}, "is unknown: choose drain-first-value, dynamic-zeroing"),
        ({"kind": "zero-heads"}, "missing 1 required positional argument: 'heads'"),
        ({"kind": "dynamic-zeroing", "score": "awft", "threshold": "a"}, "threshold is 'a'"),
        ({"kind": "dynamic-zeroing", "score": "awft", "threshold": 2}, "use 0 to 1"),
        ({"kind": "drain-first-value", "threshold": 1.5}, r"threshold 1\.5"),
        ({"kind": "drain-first-value", "phase": "never"}, "choose prefill, decode, both"),
        ({"kind": "repeat-first-token", "copies": 0}, "copies 0"),
    ):
        path.write_text(json.dumps([entry]))
        with pytest.raises(UserError, match=problem):
            read_interventions(path)


def test_tokens():
    assert RemoveBos().tokens([1, 5, 6], 1) == [5, 6]
    assert RemoveBos().tokens([5, 1], 1) == [5, 1]
    for tokens, bos, problem in (([1], 1, "consists of BOS only"), ([5], None, "no BOS to remove")):
        with pytest.raises(UserError, match=problem):
            RemoveBos().tokens(tokens, bos)
    assert RepeatFirstToken(1).tokens([1, 5], 1) == [1, 5]
    assert RepeatFirstToken(3).tokens([1, 5], 1) == [1, 1, 1, 5]
    assert not RemoveBos().changes_heads
