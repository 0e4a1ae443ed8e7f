"""The one writer of results: JSON, arrays that come and go, a full disk."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from megasink.analysis.results_files import results_of, write_json
from megasink.analysis.stored import write_arrays
from megasink.errors import UserError


@dataclass
class Found:
    """What was found."""

    rate: float


def test_what_json_lacks_is_null(tmp_path):
    write_json(tmp_path / "found.json", Found(float("nan")))
    assert json.loads((tmp_path / "found.json").read_text()) == {"rate": None}


def test_arrays_of_an_earlier_command_go(tmp_path):
    path = tmp_path / "maps.npz"
    write_arrays(path, {"a": np.arange(3)})
    with np.load(path) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]
    write_arrays(path, {})
    assert not path.exists()


@pytest.mark.parametrize("kept", [True, False])
def test_a_full_disk_is_told(tmp_path, kept):
    (tmp_path / "old.csv").write_text("old")

    def write(folder):
        (folder / "new.csv").write_text("new")
        raise OSError(28, "No space left on device")

    results = results_of(tmp_path, ["*.csv"], kept=kept)
    with pytest.raises(UserError, match="No space left") as told, results as folder:
        write(folder)
    assert ("without measuring again" in str(told.value)) == kept
    assert [path.name for path in tmp_path.iterdir()] == ["old.csv"]


def test_results_replace_earlier_ones_at_once(tmp_path):
    for name in ("old.csv", "both.csv", "mine.txt"):
        (tmp_path / name).write_text("old")
    with results_of(tmp_path, ["*.csv"]) as folder:
        (folder / "both.csv").write_text("new")
        (folder / "tables").mkdir()
        (folder / "tables" / "a.csv").write_text("new")
        assert (tmp_path / "both.csv").read_text() == "old"
    found = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.*")}
    assert found == {"both.csv": "new", "mine.txt": "old", "tables/a.csv": "new"}
