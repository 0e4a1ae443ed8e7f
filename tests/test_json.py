"""``--json``: one JSON object on stdout and nothing else, with the fields that the page lists."""

import json
import re
import shutil

import pytest

from megasink.cli import main
from tests.documented import ROOT

METRICS = [{"iteration": 1, "lm_loss": 2.0, "imbalance": 0.5, "tokens": 64, "seconds": 0.5}]
METRICS += [METRICS[0] | {"iteration": 2, "lm_loss": float("nan"), "tokens": 128}]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "iter_0000002").mkdir(parents=True)
    (folder / "config.json").write_text('{"arguments": {"save_retain_interval": 4}}')
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in METRICS))
    return folder


def fields(command):
    """The names that docs/command-line.md gives for a command."""
    page = (ROOT / "docs" / "command-line.md").read_text()
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", page, re.M)
    return set(re.findall(r"`(\w+)`", row))


def printed(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))


def names(value):
    """All names of fields in a result; not those that are data."""
    entries = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    inner = set().union(*map(names, entries))
    return inner | (set(value) if isinstance(value, dict) else set())


def test_compare(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / "other")
    told = printed(capsys, "compare", str(run), str(other), "--output", str(tmp_path / "a.png"))
    assert told["runs"]["run"]["steps"] == 2
    assert told["runs"]["run"]["lm_loss"] is None  # NaN
    assert told["runs"]["run"]["tokens_per_second"] == 128
    assert names(told) - {"run", "other"} <= fields("compare")


def test_checkpoints(run, capsys):
    told = printed(capsys, "checkpoints", str(run))
    (one,) = told["checkpoints"]
    assert (one["step"], one["tokens"], one["resumes"]) == (2, 128, False)
    assert "unfinished" in one["problem"]
    assert names(told) <= fields("checkpoints")


def test_an_error_prints_nothing_on_stdout(tmp_path, capsys):
    assert main(["checkpoints", str(tmp_path / "nothing"), "--json"]) == 2
    assert capsys.readouterr().out == ""
