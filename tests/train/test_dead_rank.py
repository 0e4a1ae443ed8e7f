"""`megasink train` with two ranks: told to stop, then robbed of one, then to the end to the bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed.pool import ROOT
from tests.distributed.test_resume import free_port
from tests.train.test_survival import FLAGS, session

STEPS = 100
LONG = [*FLAGS, "--train-iters", str(STEPS), "--save-interval", "20", "--num-workers", "1"]


@pytest.fixture
def start(tmp_path):
    """Start the launcher; nothing of it is left after the test."""
    started = []

    def run(*flags):
        errors = tmp_path / f"stderr-{len(started)}"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "megasink.cli", "train", *flags],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
            )
        started.append(process)
        return process, errors

    yield run
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if alive(process) else []:
            child.kill()
        process.kill()
        process.wait()


def alive(process):
    return process.poll() is None


def ranks_of(launcher):
    """{rank: its process}: children of torchrun, which is the child of the launcher."""
    (torchrun,) = psutil.Process(launcher.pid).children()
    return {int(child.environ()["RANK"]): child for child in torchrun.children()}


def steps(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    lines = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in lines if "lm_loss" in line]


def wait_for_step(process, run, number, errors):
    deadline = time.monotonic() + 200
    while not (trained := steps(run)) or trained[-1]["iteration"] < number:
        assert alive(process), errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_sigterm_then_a_killed_rank_then_the_end(start, pool, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    process, errors = start("--ranks", "2", "--run-dir", str(run), *LONG)
    wait_for_step(process, run, 25, errors)
    process.terminate()
    assert process.wait(100) == 2
    stopped = re.search(r"stopped by SIGTERM; go on from step (\d+) with: (.*)", errors.read_text())
    saved = int(stopped[1])
    assert saved >= 25
    assert steps(run)[-1]["iteration"] == saved  # no step is lost
    assert stopped[2] == f"megasink train --run-dir {run} --resume"

    assert not (run / "lease.json").exists()

    process, errors = start("--run-dir", str(run), "--resume")  # with as many ranks again
    wait_for_step(process, run, saved + 10, errors)
    before = time.monotonic()
    ranks = ranks_of(process)
    ranks[1].send_signal(signal.SIGKILL)
    assert process.wait(100) == 2
    assert time.monotonic() - before < 60  # the other rank does not wait for ever
    newest = max(path.name for path in (run / "checkpoints").glob("iter_*"))
    (error,) = [line for line in errors.read_text().splitlines() if "megasink: error" in line]
    assert "rank 1 was killed by SIGKILL" in error
    assert f"go on from step {int(newest[5:])} with: megasink train" in error
    assert not ranks[0].is_running()
    assert not (run / "lease.json").exists()
    deadline = time.monotonic() + 10
    while left := session(ranks[1].pid) + session(ranks[0].pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)

    for folder, flags in ((run, ["--resume"]), (whole, [])):
        pool.run(
            "tests.distributed.launch_task:train",
            timeout=300,
            flags=[*LONG, "--run-dir", str(folder), *flags],
            ranks=2,
            port=free_port(),
        )
    starts = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [start["resumed_from"] for start in starts] == [None, saved, int(newest[5:])]
    names = ("iteration", "lm_loss", "balance_loss", "grad_norm")
    found, expected = ([[s[name] for name in names] for s in steps(f)] for f in (run, whole))
    assert len(expected) == STEPS
    assert found == expected
