"""A run announces no deprecation without a row in megasink/upstream/README.md."""

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.pool import ROOT
from tests.runs import MOCK, TINY, UNTIED, steps

PAGE = (ROOT / "megasink" / "upstream" / "README.md").read_text().partition("## Deprecations")[2]
ROWS = re.findall(r"^\| `(.+?)` \| ", PAGE, re.M)
ANNOUNCED = re.compile(r"deprecat|FutureWarning|will be removed|will be mandatory", re.I)


def unanswered(text):
    """The lines of a run's output that announce a deprecation without a row."""
    lines = [line for line in text.splitlines() if ANNOUNCED.search(line)]
    return sorted({line for line in lines if not any(row in line for row in ROWS)})


def test_a_deprecation_without_a_row_is_found():
    assert len(ROWS) == len(set(ROWS)) == 7
    known, new = "MCore's async save is deprecated", "FutureWarning: another is deprecated"
    assert unanswered(f"{known}\n{new}\na step") == [new]


@pytest.mark.later
def test_every_deprecation_of_a_start_and_a_resumption_has_a_row(tmp_path_factory):
    run = tmp_path_factory.mktemp("short") / "run"  # paths in the log name no deprecation
    flags = [*TINY, *UNTIED, *MOCK, "--async-save", "--save-interval", "2", "--run-dir", str(run)]
    environment = os.environ | {"PYTHONWARNINGS": "always", "CUDA_VISIBLE_DEVICES": ""}
    said = ""
    for more in ("--train-iters 2", "--train-iters 4 --resume --override-opt-param-scheduler"):
        command = [sys.executable, "-m", "megasink", "train", *flags, *more.split()]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    assert len(steps(run)) == 4
    said += "".join(log.read_text() for log in (run / "logs").rglob("*.log"))
    assert "MCore's async save is deprecated" in said
    assert unanswered(said) == []
