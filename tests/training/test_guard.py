"""What a rank does not wait for, in a process that stands for a rank."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from megasink.training.async_checkpoint_process import live_with_rank
from tests.distributed.pool import ROOT

BOUNDED = """
with guard.bounded("handing over", 1.0):
    time.sleep(600)
"""
STOPPED = """
command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
helper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.kill(helper.pid, signal.SIGSTOP)
while Path(f"/proc/{helper.pid}/stat").read_text().split()[2] != "T":  # it may read a disk first
    time.sleep(0.02)
guard.timeout = 1.0
with guard.helping(lambda: helper.pid, "the writer"):
    time.sleep(600)
"""
PARENT = """
ours, theirs = os.pipe()
if os.fork():
    os.read(ours, 1)
    os._exit(0)
guard.start()
os.write(theirs, b"1")  # its parent ends only after it has begun to look
time.sleep(600)
"""
FORKS = """
guard.start()
if not os.fork():
    print("forked", flush=True)
    time.sleep(600)
time.sleep(600)
"""
HELPER = """
import multiprocessing
from tests.training.test_guard import helper
multiprocessing.get_context("spawn").Process(target=helper).start()
time.sleep(600)
"""
STARTS_A_RANK = """
environment = os.environ | {"MEGASINK_AGENT": str(os.getpid())}
subprocess.Popen([sys.executable, "-m", "megasink.training", "--help"], env=environment)
os._exit(0)
"""
LIGHT = """
import json, sys
import megasink.training.__main__, megasink.training.async_checkpoint_process
print(json.dumps([name for name in ("torch", "numpy", "psutil") if name in sys.modules]))
"""
WAITING = """
stop.listen()
stop.RankState.run_dir = Path("r")
print("listening", flush=True)
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""
LONG_STEP = """
stop.STEP_SECONDS = 0.3
stop.listen()
stop.RankState.run_dir, stop.RankState.step = Path(sys.argv[1]), int(sys.argv[2]) or None
stop.training_begins(signal.SIGTERM)
stop.RankState.phase = "training"
print("listening", flush=True)
while stop.RankState.signal is None:
    time.sleep(0.02)
time.sleep(float(sys.argv[3]))
print("the step is done", stop.RankState.signal, flush=True)
"""
PREFIX = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from megasink.training import stop
from megasink.training.watchdog import guard
"""


def start(body, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PREFIX + body, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("guard.start()" + BOUNDED, "handing over took longer than 1 s"),
        ("guard.start()" + STOPPED, "is stopped (kill -CONT "),
    ],
)
def test_a_wait_without_end_ends_in_one_line(body, words):
    process = start(body)
    _, errors = process.communicate(timeout=1200)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the helper
    assert process.returncode == 2
    (line,) = errors.splitlines()
    assert line.startswith("megasink: error: rank 0 ended: ")
    assert words in line


def test_a_rank_ends_when_what_started_it_has_gone():
    process = start(PARENT)
    _, errors = process.communicate(timeout=1200)  # until the last has closed its error stream
    assert "has ended; " in errors


def helper():
    """Ends with its rank, like a checkpoint's writer."""
    live_with_rank()
    print("forked", flush=True)
    time.sleep(600)


@pytest.mark.parametrize("body", [FORKS, HELPER])
def test_what_a_rank_has_started_ends_with_it(body):
    """Workers of data loaders are forked, a checkpoint's writer is spawned."""
    process = start(body)
    assert process.stdout.readline() == "forked\n"
    process.kill()
    process.communicate(timeout=500)  # until the last has closed its streams


def test_a_rank_without_torchrun_does_not_begin():
    """It ends in its imports, and does not end them first."""
    process = start(STARTS_A_RANK)
    assert process.communicate(timeout=1200) == ("", "")


def test_what_is_to_end_with_its_parent_imports_nothing_before():
    command = [sys.executable, "-c", LIGHT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_rank_that_waits(number):
    """The main thread is not needed for it."""
    process = start(WAITING)
    assert process.stdout.readline() == "listening\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=1200)
    assert process.returncode == 128 + number
    (line,) = errors.splitlines()
    assert line.startswith(f"megasink: stopped by {number.name} while starting; no checkpoint")


@pytest.mark.parametrize(("step", "is_lost"), [("0", False), ("4", False), ("5", True)])
def test_a_signal_ends_a_long_step_unless_an_earlier_one_would_be_lost(tmp_path, step, is_lost):
    """The first step of a run, the first after the checkpoint of step 4, the second after it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    # A step that is not given up ends long after it might have been; the other never does.
    process = start(LONG_STEP, str(tmp_path), step, "2" if is_lost else "600")
    assert process.stdout.readline() == "listening\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=1200)
    assert output == ("the step is done 15\n" if is_lost else "")
    assert process.returncode == (0 if is_lost else 128 + signal.SIGTERM)
    assert is_lost or errors.startswith(
        "megasink: stopped by SIGTERM while training; resume from step 4 with: "
    )
