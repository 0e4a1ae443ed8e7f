"""One run of a grid from its start to its record: training, then its measurements."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import megasink
from examples.replicate.grid.collect import collect
from examples.replicate.grid.file import GridFile, data_of, filled
from examples.replicate.grid.hardware import hardware
from examples.replicate.grid.plan import Run
from examples.replicate.grid.results import FORMAT, RunRecord, read_record
from examples.replicate.grid.start import Started, cpu_seconds
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import from_json, to_json
from megasink.files.json_file import read_object
from megasink.training.lease import clear
from megasink.training.metrics_file import NewLines
from megasink.training.stop import DIVERGES, NOT_FINITE, first_error, raised
from megasink.upstream.versions import versions

TRAINING = "training"
_MEASUREMENT = 0.2
"""Guess of the time of a measurement, as a share of training."""


@dataclass
class State:
    """What has been done of a run; kept on disk until it is finished.

    Attributes:
        measured: names of measurements.
        seconds, cpu_seconds: of everything so far.
    """

    trained: bool = False
    diverged: bool = False
    measured: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class Job:
    """A run in progress.

    Attributes:
        failure: why it has failed, or None.
        record: of the finished run, or None.
        doing: "training", or the name of a measurement.
        step: of training.
    """

    def __init__(self, run: Run, grid: GridFile, out: Path, threads: int):
        self.run, self._grid, self._out, self._threads = run, grid, out, threads
        self.failure: str | None = None
        self.record: RunRecord | None = None
        self.doing, self.step = "", 0
        self.started: Started | None = None
        self._state = _state_of(run)
        self._logs = run.folder / "logs"
        self._new_lines = NewLines(run.folder / "metrics.jsonl")
        self._began = self._cpu = 0.0

    def poll(self) -> bool:
        """Go on with what is next; return whether the run is finished or has failed."""
        if self.started is None:
            return self._next()
        self._watch()
        code = self.started.poll()
        if code is None:
            return False
        self._end_process()
        if self.doing == TRAINING:
            clear(self.run.folder)  # the lease of a killed rank
        if code == 0:
            self._done()
        elif self.doing != TRAINING or not _diverged(first_error(self._logs) or ""):
            self.failure = self._explained(code)
            return True
        else:
            self._state.trained = self._state.diverged = True
        self._keep()
        return self._next()

    @property
    def share(self) -> float:
        """How much of the run is done: an estimate between 0 and 1."""
        trained = 1.0 if self._state.trained else min(1.0, self.step / self.run.steps)
        count = len(self._grid.measure)
        done = trained + _MEASUREMENT * len(self._state.measured)
        return min(1.0, done / (1.0 + _MEASUREMENT * count))

    def stop(self) -> None:
        """Record what an interrupted run has taken so far; its process has ended."""
        if self.started is not None:
            self._end_process()
            self._keep()

    def _next(self) -> bool:
        names = [] if self._state.diverged else list(self._grid.measure)
        left = [name for name in names if name not in self._state.measured]
        if self._state.trained and not left:
            return self._finish()
        run, stamp = self.run, time.strftime("%Y%m%d-%H%M%S")
        self.doing = left[0] if self._state.trained else TRAINING
        self._logs = run.folder / "logs" / f"{stamp}-{self.doing}" / "0"
        if self.doing == TRAINING:
            self.started = run.way.train(run.flags, run.ranks, self._logs, self._threads)
        else:
            words = filled(
                self._grid.measure[self.doing],
                out=self._out,
                run=run.folder,
                data=data_of(run.cell) or "",
            )
            self.started = run.way.measure(words, self._logs, self._threads)
        # Now: the first fork waits until the server has imported everything.
        self._began, self._cpu = time.monotonic(), 0.0
        return False

    def _watch(self) -> None:
        assert self.started is not None
        self._cpu = max(self._cpu, cpu_seconds(self.started))
        for line in self._new_lines():
            self.step = line["iteration"]

    def _end_process(self) -> None:
        self._state.seconds += time.monotonic() - self._began
        self._state.cpu_seconds += self._cpu
        self.started = None

    def _done(self) -> None:
        if self.doing == TRAINING:
            self._state.trained = True
        else:
            self._state.measured.append(self.doing)

    def _keep(self) -> None:
        atomic_text(self.run.state, json.dumps(asdict(self._state)) + "\n")

    def _finish(self) -> bool:
        """Write the record, and remove the state."""
        run, grid, state = self.run, self._grid, self._state
        try:
            metrics, curves = collect(run.folder, grid.measure, diverged=state.diverged)
        except UserError as error:
            self.failure = str(error)
            return True
        self.record = RunRecord(
            format=FORMAT,
            cell=run.cell.name,
            points=run.cell.points,
            seed=run.seed,
            flags=run.cell.flags,
            measure=grid.measure,
            metrics=metrics,
            curves=curves,
            seconds=round(state.seconds, 1),
            cpu_seconds=round(state.cpu_seconds, 1),
            start=run.way.name,
            threads=self._threads if run.way.name == "fork" else None,
            versions={"megasink": megasink.__version__} | versions(),
            hardware=hardware(),
            date=time.strftime("%Y-%m-%d"),
        )
        atomic_text(run.record, json.dumps(to_json(self.record)) + "\n")
        run.state.unlink(missing_ok=True)
        return True

    def _explained(self, code: int) -> str:
        """Say why a process has failed."""
        if message := first_error(self._logs):
            return message
        if failed := raised(self._logs):
            return f"{self.doing} failed: {failed[1]} (log: {failed[0]})"
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"{self.doing} ended with {how}; logs in {self._logs}"


def _state_of(run: Run) -> State:
    """Return what was done of a run before."""
    has_metrics = (run.folder / "metrics.jsonl").is_file()
    if run.record.is_file():  # a measurement is new
        record = read_record(run.record)
        return State(
            trained=True,
            diverged=record.diverged,
            measured=list(record.measure),
            seconds=record.seconds,
            cpu_seconds=record.cpu_seconds,
        )
    if not run.state.is_file():
        return State()
    told: dict[str, Any] = read_object(run.state)
    state: State = from_json(State, told, str(run.state))
    return state if has_metrics else State()


def is_finished(run: Run, grid: GridFile) -> RunRecord | None:
    """Return the record of a run for which nothing is left to do, or None."""
    if not run.record.is_file():
        return None
    record = read_record(run.record)
    lacks = set(grid.measure) - set(record.measure)
    return None if lacks and not record.diverged else record


def _diverged(message: str) -> bool:
    return DIVERGES in message or NOT_FINITE in message
