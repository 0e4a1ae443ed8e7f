"""Run a grid: several runs side by side, resumable, with progress."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.replicate.grid.file import GridFile
from examples.replicate.grid.job import TRAINING, Job, is_finished
from examples.replicate.grid.plan import Run
from examples.replicate.grid.results import RunRecord
from examples.replicate.grid.start import tell as send
from megasink.console.printable import printable
from megasink.console.progress import Tell, progress
from megasink.console.signals import name_of
from megasink.errors import Stopped
from megasink.training.stop import SIGNALS
from megasink.training.torchrun_processes import SAVE_SECONDS

_TICK = 0.1  # seconds


@dataclass
class Outcome:
    """What came of the runs of a grid: records and failures by the name of the run."""

    records: dict[str, RunRecord] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        """The number of runs that are finished or have failed."""
        return len(self.records) + len(self.failures)


def run_all(
    runs: Sequence[Run],
    grid: GridFile,
    out: Path,
    *,
    jobs: int,
    threads: int,
    after: Callable[[Outcome], object],
) -> Outcome:
    """Run what is not finished, and return everything.

    Args:
        after: called after each run.

    Raises:
        Stopped: a signal ended the grid; its processes have saved what they could, and ended.
    """
    outcome = Outcome()
    waiting = []
    for run in runs:
        if record := is_finished(run, grid):
            outcome.records[run.name] = record
        else:
            waiting.append(run)
    with (
        _hearing() as heard,
        progress("grid", len(runs), "runs", before=len(outcome.records), every=30.0) as tell,
    ):
        running: list[Job] = []
        tell(outcome.ended, "starting", now=bool(waiting))
        try:
            while (waiting or running) and not heard:
                while waiting and len(running) < jobs:
                    running.append(Job(waiting.pop(0), grid, out, threads))
                for job in [job for job in running if job.poll()]:
                    running.remove(job)
                    _note(job, outcome, tell)
                    after(outcome)
                _show(running, outcome, tell)
                time.sleep(_TICK)
        finally:
            _end(running, heard)
    if heard:
        finished = f"{len(outcome.records)} of {len(runs)} runs are finished"
        raise Stopped(heard[0], f": {finished}; repeat the command to go on there")
    return outcome


def _note(job: Job, outcome: Outcome, tell: Tell) -> None:
    """Record the end of a run, and say it."""
    name = job.run.name
    if job.record is None:
        assert job.failure is not None
        outcome.failures[name] = job.failure
        text = f"failed: {job.failure}"
    else:
        outcome.records[name] = job.record
        took = f"{job.record.seconds:.0f} s, {job.record.cpu_seconds:.0f} CPU s"
        text = f"diverged, {took}" if job.record.diverged else took
    tell(outcome.ended, printable(f"{name}: {text}"), now=True)


def _show(running: Sequence[Job], outcome: Outcome, tell: Tell) -> None:
    shown = [
        f"{job.run.name}" + (f" ({job.doing})" if job.doing != TRAINING else "")
        for job in running[:2]
    ]
    more = [f"{len(running) - 2} more"] if len(running) > 2 else []
    state = f"now {'; '.join([*shown, *more])}" if running else ""
    tell(outcome.ended + sum(job.share for job in running), printable(state))


@contextmanager
def _hearing() -> Iterator[list[int]]:
    """Collect the signals that would end this process."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)

    before = {
        number: signal.signal(number, hear)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup
    }
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(running: Sequence[Job], heard: Sequence[int]) -> None:
    """Let the processes of an interrupted grid save, then kill what is left."""
    left = [job for job in running if job.started is not None]
    if heard and left:
        names = f"{name_of(heard[0])}: the runs will finish their step and save"
        again = "; press Ctrl-C again to end them now" * (heard[0] == signal.SIGINT)
        print(f"megasink: {names}{again}", file=sys.stderr, flush=True)
    until = time.monotonic() + (SAVE_SECONDS if heard else 0.0)
    for job in left:
        if job.started is not None:
            send(job.started, heard[0] if heard else signal.SIGTERM)
    while left:
        left = [job for job in left if job.started is not None and job.started.poll() is None]
        if heard.count(signal.SIGINT) > 1 or time.monotonic() > until:
            for job in left:
                if job.started is not None:
                    job.started.kill()
            break
        time.sleep(_TICK)
    for job in running:
        job.stop()
