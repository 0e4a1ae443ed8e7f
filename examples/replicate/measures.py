"""Measurements of the runs of another experiment: what fast.toml and full.toml hold with `uses`.

    cells = ["vanilla, no loss"]      # of the other experiment; default: all
    metrics = ["ablation/auc_ahon"]   # columns of the table: MEASUREMENT/NUMBER

    [measure.ablation]
    command = "ablate {run} --data {runs}/data/triggers-sample.jsonl --output {measured}"

{run} is the folder of a run, {runs} that of the other experiment's grid, {measured} the folder that
a measurement writes. The first word is a program of `PROGRAMS`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.replicate.grid.file import Cell, read_grid
from examples.replicate.programs import PROGRAMS
from megasink.errors import ConfigError, UserError, unknown_name
from megasink.training import flag_file

KEYS = ("cells", "metrics", "measure")
PLACES = ("run", "runs", "measured")


@dataclass(frozen=True)
class MeasuresFile:
    """A file of measurements that has no problem.

    Attributes:
        cells: those of the other experiment that are measured; seeds: its seeds.
        metrics: columns of the table.
        commands: measurement -> its words, with placeholders.
    """

    path: Path
    cells: list[Cell]
    seeds: list[int]
    metrics: list[str]
    commands: dict[str, list[str]]


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: it cannot be read, or is not TOML.
    """
    try:
        return flag_file.read_toml(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error


def read_measures(path: Path, grid_path: Path) -> MeasuresFile:
    """Read the measurements of the runs of a grid.

    Raises:
        ConfigError: lists every problem.
        UserError: a file cannot be read, or is not TOML.
    """
    told = read_toml(path)
    grid = read_grid(grid_path)
    names = [cell.name for cell in grid.cells]
    problems = [unknown_name("the key", key, KEYS) for key in told if key not in KEYS]
    chosen, metrics = told.get("cells", names), told.get("metrics")
    for key, value in (("cells", chosen), ("metrics", metrics)):
        if not isinstance(value, list) or not value:
            problems.append(f"{key} is {value!r}: give a list of names")
    if not problems:
        problems += [unknown_name("cells:", cell, names) for cell in chosen if cell not in names]
    commands, found = _commands(told.get("measure", {}))
    problems += found
    if not problems:
        known = {f"{name}/{number}" for name, words in commands.items() for number in _gives(words)}
        problems += [unknown_name("metrics:", m, sorted(known)) for m in metrics if m not in known]
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    cells = [cell for cell in grid.cells if cell.name in chosen]
    return MeasuresFile(path, cells, grid.seeds, metrics, commands)


def _gives(words: list[str]) -> list[str]:
    return PROGRAMS[words[0]].numbers(words)


def _commands(told: Any) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words of each measurement, and the problems."""
    commands: dict[str, list[str]] = {}
    problems = []
    if not isinstance(told, Mapping) or not told:
        return {}, ["measure: give tables, such as [measure.ablation]"]
    for name, each in told.items():
        if not re.fullmatch(r"\w[\w.-]*", name):
            problems.append(f"measure.{name}: use letters, digits, dots and dashes")
        if not isinstance(each, Mapping) or set(each) != {"command"}:
            problems.append(f"measure.{name}: give command, and no other key")
            continue
        words = str(each["command"]).split()
        if not words or words[0] not in PROGRAMS:
            problems.append(unknown_name(f"measure.{name}:", " ".join(words[:1]), PROGRAMS))
            continue
        problems += [f"measure.{name}: {text}" for text in _place_problems(words)]
        commands[name] = words
    return commands, problems


def _place_problems(words: list[str]) -> Iterator[str]:
    places = [place for word in words for place in re.findall(r"\{(\w+)\}", word)]
    for place in places:
        if place not in PLACES:
            yield unknown_name("the placeholder", place, PLACES)
    if "{measured}" not in words:
        yield "the command does not write {measured}: add --output {measured}"


def filled(words: list[str], *, run: Path, runs: Path, measured: Path) -> list[str]:
    """Return words with their placeholders filled in."""
    places = {"run": str(run), "runs": str(runs), "measured": str(measured)}
    return [re.sub(r"\{(\w+)\}", lambda found: places[found[1]], word) for word in words]
