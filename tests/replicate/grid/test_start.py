"""A fork ends with the process that asked for it, even on SIGKILL."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

FORKS = """
import time
from examples.replicate.grid.start import fork_server
from megasink.training.guard import guard


def wait():
    guard.start()
    print("started", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    fork_server().Process(target=wait, daemon=True).start()
    time.sleep(600)
"""


def test_a_fork_ends_with_its_killed_process(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "forks.py"], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.kill()
    process.wait()
    left = psutil.wait_procs(started, timeout=30)[1]
    for one in left:
        one.kill()
    assert left == []
