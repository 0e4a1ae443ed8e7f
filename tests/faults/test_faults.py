"""Some commands under failures of the machine; `python -m tests.faults` takes all of them."""

import os
import shutil

import pytest

from tests.forkserver import server

CHOSEN = """
compare:file-size-700 checkpoints:read-error-0 checkpoints:stdout-full data:quota-3000
""".split()
MOUNTED = ["compare:full-0.3", "compare:read-only"]


def test_a_failure_of_the_machine_is_one_line_and_nothing_is_left():
    if shutil.which("cc") is None:
        pytest.skip("failing calls of the C library need a C compiler")
    names = CHOSEN + (MOUNTED if os.getuid() == 0 else [])
    result = server().run(["tests.faults", *names])
    if "only root can" in result.stderr:
        pytest.skip("mounts are not allowed here")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 wrong, " in result.stdout
