"""An export as a process of its own: what a kill leaves, and its memory."""

import subprocess
import sys

import pytest

from tests.distributed.layout import SINGLE
from tests.test_packaging import ROOT

KILLED = """
import os, sys
from pathlib import Path
from megasink.convert import safetensors_files, to_hf
as_bytes = safetensors_files._bytes
def dying(tensor, name, like):
    if "layers.1" in name:
        os._exit(9)
    return as_bytes(tensor, name, like)
safetensors_files._bytes = dying
to_hf.export(to_hf.source_of(Path(sys.argv[1])), Path(sys.argv[2]))
"""
MEASURED = """
import sys
from pathlib import Path
from megasink.convert import to_hf
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
source = to_hf.source_of(Path(sys.argv[1]))
before = peak()
to_hf.export(source, Path(sys.argv[2]), say=lambda line: None)
print(peak() - before)
"""


def python(code, *arguments):
    """A process that never imports megatron: an export needs none of it."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """A run of 24 layers of 12 MB."""
    folder = tmp_path_factory.mktemp("large") / "run"
    pool.run("tests.convert.tasks:save_run", SINGLE, folder=str(folder), name="large")
    return folder


def test_a_killed_export_leaves_nothing_that_loads(run, tmp_path):
    assert python(KILLED, run, tmp_path / "hf").returncode == 9
    assert not (tmp_path / "hf").exists()
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith(".hf.partial-")
    assert not (partial / "config.json").exists()


def test_memory_is_that_of_the_largest_tensor_not_of_the_model(run, tmp_path):
    done = python(MEASURED, run, tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert written > 3e8
    # 110 MB: code, and steps that are read ahead.
    assert int(done.stdout) < 2e8
