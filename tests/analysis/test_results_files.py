"""The one writer of results: JSON, arrays that come and go, a full disk."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from megasink.analysis import result_store
from megasink.analysis.result_store import write_results
from megasink.errors import UserError


@dataclass
class Found:
    """What was found."""

    rate: float


def test_what_json_lacks_is_null(tmp_path):
    write_results(tmp_path, {"found.json": Found(float("nan"))})
    assert json.loads((tmp_path / "found.json").read_text()) == {"rate": None}


def test_arrays_of_an_earlier_command_go(tmp_path):
    path = tmp_path / "maps.npz"
    write_results(tmp_path, {"maps.npz": {"a": np.arange(3)}})
    with np.load(path) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]
    write_results(tmp_path, {"maps.npz": {}})
    assert not path.exists()


@pytest.mark.parametrize("kept", [True, False])
def test_a_full_disk_is_told(tmp_path, monkeypatch, kept):
    (tmp_path / "old.csv").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_store, "write_csv", full)
    with pytest.raises(UserError, match="No space left") as told:
        write_results(tmp_path, {"new.txt": "new", "new.csv": [{"a": 1}]}, ["*.csv"], kept=kept)
    assert ("without measuring again" in str(told.value)) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]


def test_results_replace_earlier_ones_at_once(tmp_path):
    for name in ("old.csv", "both.csv", "mine.txt"):
        (tmp_path / name).write_text("old")
    write_results(tmp_path, {"both.csv": [{"a": 1}], "tables/a.csv": [{"a": 2}]}, ["*.csv"])
    found = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.*")}
    assert found == {"both.csv": "a\n1\n", "mine.txt": "old", "tables/a.csv": "a\n2\n"}
