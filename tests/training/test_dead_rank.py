"""`megasink train` with two ranks: told to stop, then robbed of one, then to the end to the bit."""

import contextlib
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests import forkserver, runs
from tests.forkserver import HANG_SECONDS
from tests.training.six_steps import FLAGS
from tests.waiting import handles, until

STEPS = 100
LONG = [*FLAGS, "--train-iters", str(STEPS), "--save-interval", "20", "--num-workers", "1"]
LONG += ["--distributed-timeout-minutes", "60"]  # so that nothing ends by it in a test


@pytest.fixture(scope="module")
def nursery():
    nursery = forkserver.nested()
    yield nursery
    nursery.close()


@pytest.fixture
def start(nursery, tmp_path):
    """Start the launcher; nothing of it is left after the test."""
    begun = []

    def run(*flags, stdout=None):
        stderr = tmp_path / f"stderr-{len(begun)}"
        begun.append(stderr)
        argv = ["megasink", "train", *flags]
        return nursery.start(argv, stdout=stdout, stderr=stderr, tree=True), stderr

    yield run
    for process in nursery.left():
        process.kill()


def ranks_of(launcher):
    """The ranks: children of torchrun, which is the child of the launcher; leaders of sessions."""
    (torchrun,) = psutil.Process(launcher).children()
    return sorted(
        (child for child in torchrun.children() if os.getsid(child.pid) == child.pid),
        key=lambda child: (child.create_time(), child.pid),
    )


def wait_until_all_have_ended(nursery):
    """By themselves: before any timeout of torch or torchrun could end them."""
    # A single look misses processes whose parent has ended while it was made.
    until(lambda: not any(nursery.left() for _ in range(5)), nursery.left)


def steps(run):
    return runs.steps(run) if (run / "metrics.jsonl").is_file() else []


def wait_for_step(nursery, run, number, errors):
    def reached():
        assert nursery.left(), errors.read_text()
        return (trained := steps(run)) and trained[-1]["iteration"] >= number

    until(reached)


def last_line(errors):
    (line,) = [line for line in errors.read_text().splitlines() if line.startswith("megasink: ")]
    return line


def test_sigterm_then_a_killed_rank_then_the_end(start, nursery, pool, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"

    process, errors = start("--ranks", "2", "--run-dir", str(run), *LONG)
    wait_for_step(nursery, run, 25, errors)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    stopped = re.search(
        r"stopped by SIGTERM; resume from step (\d+) with: (.*)", errors.read_text()
    )
    saved = int(stopped[1])
    assert saved >= 25
    assert steps(run)[-1]["iteration"] == saved  # no step is lost
    assert stopped[2] == f"megasink train --run-dir {run} --resume"

    assert not (run / "lease" / "owner.json").exists()

    process, errors = start("--run-dir", str(run), "--resume")  # with as many ranks again
    wait_for_step(nursery, run, saved + 25, errors)  # a checkpoint later
    ranks_of(process.pid)[1].send_signal(signal.SIGKILL)
    assert process.wait(HANG_SECONDS) == 2
    error = last_line(errors)
    assert "rank 1 was killed by SIGKILL" in error
    newest = int(re.search(r"resume from step (\d+) with: megasink train", error)[1])
    assert newest > saved
    wait_until_all_have_ended(nursery)
    assert not (run / "lease" / "owner.json").exists()

    for folder, flags in ((run, ["--resume"]), (whole, [])):
        pool.train([*LONG, "--run-dir", str(folder), *flags], 2)
    assert runs.resumed_from(run) == [None, saved, newest]
    names = ("iteration", "lm_loss", "balance_loss", "grad_norm")
    found, expected = ([[s[name] for name in names] for s in steps(f)] for f in (run, whole))
    assert len(expected) == STEPS
    assert found == expected


def test_when_the_launcher_is_killed_all_ends(start, nursery, tmp_path):
    process, errors = start("--ranks", "2", "--run-dir", str(tmp_path / "run"), *LONG)
    wait_for_step(nursery, tmp_path / "run", 2, errors)
    process.kill()
    assert process.wait(HANG_SECONDS) == -signal.SIGKILL
    wait_until_all_have_ended(nursery)


@pytest.mark.parametrize("moment", ["start", "torchrun", "ranks"])
def test_ctrl_c_in_a_start_ends_it_at_once(start, nursery, tmp_path, moment):
    """A terminal's Ctrl-C: to all that the launcher has in its own process group."""
    process, errors = start("--ranks", "2", "--run-dir", str(tmp_path / "run"), *LONG)

    def reached():
        if moment == "start":  # it catches SIGHUP
            return handles(process.pid, signal.SIGHUP)
        torchrun = psutil.Process(process.pid).children()
        return torchrun if moment == "torchrun" else torchrun and torchrun[0].children()

    until(reached)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(HANG_SECONDS) == 128 + signal.SIGINT
    assert last_line(errors).startswith("megasink: stopped by SIGINT")
    wait_until_all_have_ended(nursery)


def test_a_closed_terminal_saves_the_step(start, nursery, tmp_path):
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    flags = ("--ranks", "2", "--run-dir", str(run), *LONG)
    process, errors = start(*flags, stdout=Path(os.ttyname(theirs)))
    os.close(theirs)
    os.set_blocking(ours, False)

    def trained():
        with contextlib.suppress(OSError):  # nothing to read
            os.read(ours, 1 << 16)
        assert nursery.left(), errors.read_text()
        return steps(run)

    try:
        until(trained)
    finally:
        os.close(ours)
    assert process.wait(HANG_SECONDS) == 128 + signal.SIGHUP
    saved = steps(run)[-1]["iteration"]
    (log,) = run.glob("logs/*/launcher.log")  # nobody could read it elsewhere
    assert f"megasink: stopped by SIGHUP; resume from step {saved} with: " in log.read_text()
    wait_until_all_have_ended(nursery)
