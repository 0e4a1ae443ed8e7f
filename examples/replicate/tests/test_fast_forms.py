"""`make replicate`: the fast form of every experiment, as it is typed."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples.replicate import record
from examples.replicate.experiment import FORMS, letters, read_experiment

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.replicate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicate")


def run(name, folder):
    program = ROOT / "examples" / "replicate" / "run.py"
    words = [name, "--form", FORMS[0], "--output", folder / "runs", "--results", folder / "results"]
    subprocess.run([sys.executable, program, *words], check=True, cwd=folder)


FAST = [name for name, folder in letters().items() if (folder / f"{FORMS[0]}.toml").is_file()]


@pytest.mark.parametrize("name", FAST)
def test_fast_form(name, folder):
    experiment = read_experiment(letters()[name], FORMS[0])
    if experiment.uses:
        run(experiment.uses, folder)  # skipped where it is done
    run(name, folder)
    result = record.read_result(folder / "results" / f"{name}-{FORMS[0]}.json")
    assert list(result.cells) == experiment.cells
    assert len(result.verdicts) == len(experiment.claims)
    for verdict in result.verdicts:
        print(f"{verdict.says}: {verdict.verdict}")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    run(name, folder)  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
