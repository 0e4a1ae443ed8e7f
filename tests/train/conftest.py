"""A run that never stopped, and runs that die: shared by the files of this folder."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from megasink.cli import main
from tests.distributed.pool import ROOT, free_port
from tests.forkserver import HANG_SECONDS, server
from tests.train.six_steps import FLAGS


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Flags of a small data set of real text: this repository's sources."""
    prefix = tmp_path_factory.mktemp("text") / "sources"
    arguments = ["data", str(ROOT / "megasink"), "--output", str(prefix)]
    assert main([*arguments, "--train-tokenizer", "512", "--workers", "1"]) == 0
    return ["--data-path", str(prefix), "--tokenizer-model", f"{prefix}-tokenizer"]


@pytest.fixture(scope="session")
def train(pool):
    """Run the trainer to its end in a worker."""
    return lambda folder, *flags: pool.train([*FLAGS, "--run-dir", str(folder), *flags])


@pytest.fixture(scope="session")
def finished(train, tmp_path_factory):
    """A run that never stopped: checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder)
    return folder


@pytest.fixture(scope="session")
def dying():
    """Train in a process of its own that dies: its exit code and what it said.

    Nothing that it started may be left a few seconds later.
    """
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}

    def run(moment, folder, *flags):
        variables = numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        errors = folder.with_suffix(".stderr")
        process = server().start(
            ["tests.train.dying_entry", moment, *FLAGS, "--run-dir", str(folder), *flags],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=folder.with_suffix(".stdout"),
            stderr=errors,
        )
        try:
            code = process.wait(HANG_SECONDS)
            deadline = time.monotonic() + 100
            while left := session(process.pid):
                assert time.monotonic() < deadline, f"still there: {left}"
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return code, errors.read_text()

    return run


def session(leader):
    """Command lines of what a process started, itself left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.append(" ".join(process.cmdline()))
    return found
