"""`make real` from a folder to the picture, on a tiny model and made-up texts."""

import json

import pytest

from examples.real_models import run, scores
from megasink.errors import ConfigError


def test_everything_from_a_folder_of_ones_own(model, capsys, monkeypatch):
    monkeypatch.setattr(run.claims, "main", lambda folders: 0)  # test_claims.py runs it
    assert run.main([str(model)]) == 0
    folder = model.parent / "runs/real-models"
    (found,) = json.loads((folder / "importance.json").read_text())
    assert found["model"] == "own"
    assert found["part"] == ""
    assert found["measured"]["texts"] == 6
    assert found["measured"]["heads"] == 12
    rows = found["kl"]["scores"]
    assert len(rows) == len(found["rise"]["scores"]) == len(scores.MEASURES) + 4
    # Without a learnable sink importance is 1 - AWFT, but for the first row of each text.
    assert rows["importance"]["all"] == rows["awft"]["all"]
    assert (folder / "importance.png").read_bytes().startswith(b"\x89PNG")
    assert "| importance |" in capsys.readouterr().out
    before = (folder / "zeroing-own.jsonl").read_bytes()
    assert run.main([str(model)]) == 0
    assert (folder / "zeroing-own.jsonl").read_bytes() == before


def test_every_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*missing.*empty"):
        run.main([str(tmp_path / "missing"), str(tmp_path / "empty")])
