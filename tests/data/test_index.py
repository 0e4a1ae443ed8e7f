"""Damaged data sets are refused before the first step, by sizes and a bounded look inside."""

import itertools
import json

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megasink.data import indexed_dataset
from megasink.data.corpus import Corpus
from megasink.data.indexed_dataset import data_problem, sequence_lengths
from megasink.data.preprocess import preprocess
from tests.damage.data_sets import CASES
from tests.damage.harness import Sound

VOCABULARY = 330
INSIDE = [
    name
    for name, case in CASES.items()
    if not name.startswith(("list-", "caches-", "id-between"))
    and case.says not in ("does not describe", "--split")
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory, folder):
    """Forty documents of characters that are spelled in bytes, so that only small ids occur."""
    root = tmp_path_factory.mktemp("sound")
    (root / "a.jsonl").write_text(
        "".join(json.dumps({"text": chr(0x4E00 + i) * 3}) + "\n" for i in range(40))
    )
    report = preprocess(Corpus([root / "a.jsonl"]), root / "data" / "text", folder, workers=1)
    assert report.largest_id < VOCABULARY
    return Sound(root)


@pytest.mark.parametrize("name", INSIDE)
def test_damage_is_named_with_its_place(sound, tmp_path, name):
    argv = CASES[name].make(tmp_path, sound)
    problem = data_problem(argv[argv.index("--data-path") + 1], VOCABULARY)
    assert problem is not None
    assert CASES[name].says in problem
    assert "\n" not in problem


def test_a_sound_data_set_has_no_problem(sound, tmp_path):
    assert data_problem(str(sound.data), VOCABULARY) is None
    assert len(sequence_lengths(str(sound.data))) == 40
    # of Megatron's own tool: no sidecar, and documents of several sequences
    builder = IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=DType.optimal_dtype(70_000))
    builder.add_document(np.arange(10), [4, 6])
    builder.add_document(np.arange(5), [5])
    builder.finalize(str(tmp_path / "b.idx"))
    assert data_problem(str(tmp_path / "b"), 10) is None
    assert "contains the id 9 at token 9" in data_problem(str(tmp_path / "b"), 9)
    assert data_problem(str(tmp_path / "b"), None) is None


def test_of_a_large_data_set_the_ends_and_places_between_are_looked_at():
    parts = list(indexed_dataset._sampled_slices(10_000, 1000))
    assert len(parts) == 16
    assert (parts[0].start, parts[-1].stop) == (0, 10_000)
    assert sum(p.stop - p.start for p in parts) <= 1000
    assert all(a.stop <= b.start for a, b in itertools.pairwise(parts))
    assert list(indexed_dataset._sampled_slices(1000, 1000)) == [slice(0, 1000)]
