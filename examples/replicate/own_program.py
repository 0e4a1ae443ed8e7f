"""An experiment whose runs a program of its own makes: `program = "NAME"` of experiment.toml.

The file of a form then holds `metrics`, the columns of the table, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.replicate.grid.file import Cell
from examples.replicate.measures import read_toml
from examples.replicate.record import Run
from megasink.errors import ConfigError, unknown_name


@dataclass(frozen=True, kw_only=True)
class OwnProgram:
    """What makes the runs.

    Attributes:
        curves: that every run has; x: what their horizontal axis is.
        metrics: that every run has.
        runs: makes what is missing in a folder, and returns all runs.
    """

    cells: tuple[str, ...]
    seeds: tuple[int, ...]
    curves: tuple[str, ...]
    metrics: tuple[str, ...]
    x: str
    runs: Callable[[Path], list[Run]]


@dataclass(frozen=True)
class ProgramFile:
    """The file of a form that has no problem; attributes as those of `GridFile`."""

    path: Path
    program: OwnProgram
    cells: list[Cell]
    seeds: list[int]
    metrics: list[str]


def read_program_file(path: Path, name: str) -> ProgramFile:
    """Read the form of an experiment with a program.

    Raises:
        ConfigError: lists every problem.
        UserError: the file cannot be read, or is not TOML.
    """
    from examples.replicate import context

    programs = {"context": context.PROGRAM}
    if name not in programs:
        raise ConfigError([unknown_name("program", name, programs)])
    program = programs[name]
    told = read_toml(path)
    problems = [unknown_name("the key", key, ["metrics"]) for key in told if key != "metrics"]
    metrics = told.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        problems.append(f"metrics is {metrics!r}: give a list of names")
    else:
        known = program.metrics
        problems += [unknown_name("metrics:", m, known) for m in metrics if m not in known]
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    assert metrics is not None
    cells = [Cell(cell, {}, {}, cell) for cell in program.cells]
    return ProgramFile(path, program, cells, list(program.seeds), metrics)
