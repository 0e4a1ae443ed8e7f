"""The runs of a grid, and everything that must be right before the first one starts."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.replicate.grid.collect import NAMES
from examples.replicate.grid.file import FILES, Cell, GridFile, data_of, filled
from examples.replicate.grid.measurements import MEASUREMENTS, measurement_of
from examples.replicate.grid.results import RunRecord, read_record
from examples.replicate.grid.start import Way, way_of
from megasink.cli import main_of
from megasink.errors import ConfigError, UserError, unknown_name
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object
from megasink.options.command_parser import flag_problems
from megasink.training import preflight
from megasink.training.flag_file import flag_words, refused

_GRID = "grid.json"
_UNSAFE = "not taken from a file, for safety (SECURITY.md)"


@dataclass(frozen=True)
class Run:
    """One run of a grid.

    Attributes:
        name: the cell and the seed.
        folder: of the run.
        record: the file that says that it is finished.
        state: the file of what has been done of it so far.
        flags: words of its rank.
        ranks: processes.
        steps: of training.
    """

    cell: Cell
    seed: int
    name: str
    folder: Path
    record: Path
    state: Path
    flags: list[str]
    ranks: int
    steps: int
    way: Way


def plan(grid: GridFile, out: Path) -> list[Run]:
    """Return the runs of a grid, seed by seed.

    Raises:
        ConfigError: lists every problem with flags, metrics, measurements and the output folder.
    """
    problems = [*_metric_problems(grid), *_command_problems(grid, out)]
    found: dict[str, list[str]] = {}  # problem -> cells
    runs = []
    for cell, args in _parsed(grid, out):
        if isinstance(args, ConfigError):
            for problem in args.problems:
                found.setdefault(problem, []).append(cell.name)
        else:
            runs += [_run(cell, seed, out, args) for seed in grid.seeds]
    for problem, cells in found.items():
        where = "; ".join(cells[:3]) + f" and {len(cells) - 3} more" * (len(cells) > 3)
        problems.append(problem if len(cells) == len(grid.cells) > 1 else f"{where}: {problem}")
    problems += _folder_problems(grid, out)
    if problems:
        raise ConfigError(f"{grid.path}: {problem}" for problem in problems)
    return sorted(runs, key=lambda run: grid.seeds.index(run.seed))


def _parsed(grid: GridFile, out: Path) -> Iterator[tuple[Cell, Namespace | ConfigError]]:
    """Yield each cell with the arguments of its first run, or what refuses it."""
    lines: dict[str, preflight.Line | ConfigError] = {}
    for cell in grid.cells:
        ranks = cell.flags.get("ranks")
        try:
            words = _words(cell, grid.seeds[0], out)
            if ranks is not None and (type(ranks) is not int or ranks < 1):
                raise ConfigError(f"ranks {ranks!r}: use a whole number, 1 or more")
            lines[cell.name] = preflight.Line([*words, "--resume", "auto"], ranks)
        except ConfigError as error:
            lines[cell.name] = error
    checked = iter(
        preflight.check(line for line in lines.values() if isinstance(line, preflight.Line))
    )
    for cell in grid.cells:
        line = lines[cell.name]
        yield cell, line if isinstance(line, ConfigError) else next(checked)


def _words(cell: Cell, seed: int, out: Path) -> list[str]:
    folder = out / cell.folder / f"seed-{seed}"
    flags = {name: value for name, value in cell.flags.items() if name not in ("ranks", "cpu")}
    words = ["--device", "cpu"] if cell.flags.get("cpu") else []
    words += filled(flag_words(flags), out=out, run=folder)
    if unsafe := refused(words, out):
        raise ConfigError(f"{text}: {_UNSAFE}" for text in unsafe.values())
    return ["--run-dir", str(folder), "--seed", str(seed), *words]


def _run(cell: Cell, seed: int, out: Path, args: Namespace) -> Run:
    folder = out / cell.folder / f"seed-{seed}"
    return Run(
        cell=cell,
        seed=seed,
        name=f"{cell.name}, seed {seed}",
        folder=folder,
        record=folder.with_name(f"{folder.name}.json"),
        state=folder.with_name(f"{folder.name}.partial.json"),
        flags=_words(cell, seed, out),
        ranks=args.world_size,
        steps=args.train_iters or -(-args.train_samples // (args.global_batch_size or 1)),
        way=way_of(args, args.world_size),
    )


def _metric_problems(grid: GridFile) -> Iterator[str]:
    for name in grid.metrics:
        place, slash, metric = name.partition("/")
        if not slash:
            if name not in NAMES:
                yield unknown_name("the metric", name, NAMES)
        elif place not in grid.measure:
            yield f"the metric {name!r} is of the measurement {place!r}, which is not in the file"
        elif command := measurement_of(grid.measure[place]):
            yields = command.metrics(grid.measure[place])
            if metric.rpartition("/")[2] not in yields:
                yield unknown_name(f"the metric of {place}", metric, yields)


def _command_problems(grid: GridFile, out: Path) -> Iterator[str]:
    """Parse the command of each measurement as it will be for the first run."""
    run = out / grid.cells[0].folder / f"seed-{grid.seeds[0]}"
    for name, words in grid.measure.items():
        if measurement_of(words) is None:
            text = unknown_name("the command", words[0], MEASUREMENTS)
            yield f"measure.{name}: {text}"
            continue
        for cell in grid.cells if any("{data}" in word for word in words) else ():
            if data_of(cell) is None:
                yield f"measure.{name}: {{data}} in {cell.name!r}, which has no data of one name"
        words = filled(words, out=out, run=run, data=data_of(grid.cells[0]) or "")
        for flag, text in refused(words, run).items():
            if flag:  # MODEL and the command itself stand before all flags
                yield f"measure.{name}: {text}: {_UNSAFE}"
        for problem in flag_problems(main_of(words[0]), words[1:]):
            yield f"measure.{name}: {problem}"


def _folder_problems(grid: GridFile, out: Path) -> Iterator[str]:
    """Report results of other flags in the output folder; more cells and seeds are welcome."""
    if out.exists() and not out.is_dir():
        yield f"--output {out} is a file: give a folder"
        return
    if not (out / _GRID).is_file():
        written = (*(cell.folder for cell in grid.cells), *FILES)
        taken = [name for name in written if (out / name).exists()]
        if taken:
            yield f"--output {out} holds {taken[0]}, which is not of a grid: choose another folder"
        return
    try:
        before = read_object(out / _GRID)
        cells, seeds = dict(before["cells"]), list(before["seeds"])
    except (UserError, KeyError, TypeError, ValueError) as error:
        yield f"--output {out}: {_GRID} cannot be read ({error}): choose another folder"
        return
    other = f"--output {out} holds another grid"
    now = {cell.name: cell for cell in grid.cells}
    for name, told in cells.items():
        done = [seed for seed in seeds if _has_begun(out / told["folder"], seed)]
        if not done:
            continue
        if name not in now:
            yield f"{other}: it has the cell {name!r}, and the file has not: choose another folder"
        elif told["flags"] != now[name].flags:
            what = ", ".join(_differences(told["flags"], now[name].flags))
            yield f"{other}: {name!r} had {what}: choose another folder, or delete its folder"
        elif gone := [seed for seed in done if seed not in grid.seeds]:
            yield f"{other}: it has seed {gone[0]}, and the file has not: choose another folder"
    yield from _record_problems(grid, out)


def _has_begun(folder: Path, seed: int) -> bool:
    metrics = folder / f"seed-{seed}" / "metrics.jsonl"
    return (folder / f"seed-{seed}.json").is_file() or metrics.is_file()


def _record_problems(grid: GridFile, out: Path) -> Iterator[str]:
    for cell in grid.cells:
        for seed in grid.seeds:
            path = out / cell.folder / f"seed-{seed}.json"
            if not path.is_file():
                continue
            try:
                record = read_record(path)
            except UserError as error:
                yield str(error)
                continue
            if record.flags != cell.flags or record.cell != cell.name or record.seed != seed:
                what = ", ".join(_differences(record.flags, cell.flags)) or "another name"
                yield f"{path} was made with {what}: choose another folder, or delete it"
            for name, words in grid.measure.items():
                if record.measure.get(name, words) != words:
                    yield (
                        f"{path} was measured with another command (measure.{name}): give the "
                        "measurement another name, or delete the file"
                    )
                elif _lacks(record, name) and not path.with_suffix("").is_dir():
                    yield (
                        f"{path} has no measurement {name}, and the folder of the run is gone: "
                        "delete the file to train it again"
                    )


def _lacks(record: RunRecord, measurement: str) -> bool:
    return measurement not in record.measure and not record.diverged


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    told = [f"{name} {before[name]!r}" if name in before else f"no {name}" for name in names]
    return [*told[:3], *["more"] * (len(told) > 3)]


def begin(grid: GridFile, out: Path, runs: Sequence[Run]) -> None:
    """Create the output folder and write down which grid it holds.

    Raises:
        UserError: it cannot be written.
    """
    cells = {cell.name: {"folder": cell.folder, "flags": cell.flags} for cell in grid.cells}
    told = {"title": grid.title, "seeds": grid.seeds, "measure": grid.measure, "cells": cells}
    try:
        for folder in {run.folder.parent for run in runs}:
            folder.mkdir(parents=True, exist_ok=True)
        atomic_text(out / _GRID, json.dumps(told, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--output {out} cannot be written: {error.strerror or error}") from error
