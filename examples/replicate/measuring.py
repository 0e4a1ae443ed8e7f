"""Run the measurements of an experiment that uses the runs of another, side by side, resumably.

Each measurement is a process of its own, forked from one that has imported everything. A finished
one leaves CELL/seed-N/NAME.json beside its folder: its command, its time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.replicate.grid.hardware import cores
from examples.replicate.grid.results import RunRecord, read_record
from examples.replicate.grid.start import fork_server
from examples.replicate.measures import MeasuresFile, filled
from examples.replicate.programs import PROGRAMS
from examples.replicate.record import Run
from megasink.checkpoints.find import find_checkpoint
from megasink.console.progress import progress
from megasink.errors import ConfigError, UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object

_TICK = 0.1  # seconds


@dataclass(frozen=True)
class Measuring:
    """One measurement of one run.

    Attributes:
        cell, seed: of the run; name: of the measurement.
        words: its command; folder: that it writes.
    """

    cell: str
    seed: int
    name: str
    words: list[str]
    folder: Path

    @property
    def done(self) -> Path:
        """The file that says that it is finished."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def log(self) -> Path:
        """What the program says."""
        return self.folder.with_name(f"{self.folder.name}.log")


def used_runs(file: MeasuresFile, runs: Path) -> dict[tuple[str, int], RunRecord]:
    """Return the records of the runs that are measured.

    Raises:
        ConfigError: lists every run that is missing, diverged, or has no checkpoint.
    """
    records: dict[tuple[str, int], RunRecord] = {}
    problems = []
    for cell in file.cells:
        for seed in file.seeds:
            folder = runs / cell.folder / f"seed-{seed}"
            try:
                record = read_record(folder.with_name(f"{folder.name}.json"))
                if not record.diverged:
                    find_checkpoint(folder)
                records[cell.name, seed] = record
            except UserError as error:
                problems.append(str(error))
    if problems:
        again = f"run the experiment that makes them first; its runs are looked for in {runs}"
        raise ConfigError([*problems, again])
    return records


def plan(
    file: MeasuresFile, records: dict[tuple[str, int], RunRecord], runs: Path, out: Path
) -> list[Measuring]:
    """Return every measurement; a run that diverged has none.

    Raises:
        ConfigError: an output folder holds a measurement by another command.
    """
    planned, problems = [], []
    for cell in file.cells:
        for seed in file.seeds:
            if records[cell.name, seed].diverged:
                continue
            place = Path(cell.folder, f"seed-{seed}")
            for name, words in file.commands.items():
                measured = out / place / name
                ready = filled(words, run=runs / place, runs=runs, measured=measured)
                one = Measuring(cell.name, seed, name, ready, measured)
                if one.done.is_file() and read_object(one.done).get("words") != ready:
                    problems.append(f"{one.done} was made by another command: delete it to repeat")
                planned.append(one)
    if problems:
        raise ConfigError(problems)
    return planned


def measure_all(planned: Sequence[Measuring], jobs: int) -> None:
    """Run what is not finished.

    Raises:
        UserError: measurements failed; the others were made.
    """
    context = fork_server()
    threads = max(1, cores() // jobs)
    waiting = [one for one in planned if not one.done.is_file()]
    before = len(planned) - len(waiting)
    running: list[tuple[Measuring, Any]] = []
    failed = []
    done = before
    with progress("measuring", len(planned), "measurements", before=before) as tell:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = waiting.pop(0)
                    one.folder.parent.mkdir(parents=True, exist_ok=True)
                    process = context.Process(target=_measure, args=(one, threads), daemon=True)
                    process.start()
                    running.append((one, process))
                for one, process in [each for each in running if each[1].exitcode is not None]:
                    running.remove((one, process))
                    done += 1
                    if process.exitcode:
                        failed.append(f"{one.cell}, seed {one.seed}: {one.name} failed: {one.log}")
                    tell(done, f"{one.cell}, seed {one.seed}: {one.name}", now=True)
                time.sleep(_TICK)
        finally:
            for _, process in running:
                process.terminate()
    if failed:
        raise UserError("; ".join(failed))


def _measure(one: Measuring, threads: int) -> None:
    """Run a measurement in this process, just forked, and write down that it is done."""
    log = os.open(one.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    from megasink.training.watchdog import guard

    guard.start()  # it ends with the process that started it
    torch.set_num_threads(threads)
    began, cpu = time.monotonic(), time.process_time()
    if code := PROGRAMS[one.words[0]].main(one.words):
        sys.exit(code)
    took = {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }
    atomic_text(one.done, json.dumps({"words": one.words} | took) + "\n")


def measured_runs(
    planned: Sequence[Measuring],
    records: dict[tuple[str, int], RunRecord],
) -> Iterator[Run]:
    """Yield every run with its measurements, and the curves of its training."""
    for (cell, seed), record in records.items():
        numbers: dict[str, float | None] = {}
        seconds = cpu_seconds = 0.0
        for one in planned:
            if (one.cell, one.seed) != (cell, seed):
                continue
            found = PROGRAMS[one.words[0]].read(one.folder)
            numbers |= {f"{one.name}/{name}": value for name, value in found.items()}
            took = read_object(one.done)
            seconds += took["seconds"]
            cpu_seconds += took["cpu_seconds"]
        yield Run(
            cell=cell,
            seed=seed,
            metrics=numbers,
            curves=record.curves,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
        )
