"""Read a grid file: TOML, with every problem of its form in one message.

README.md beside this file describes the format.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError, unknown_name
from megasink.training.flag_file import Flags, form_problems, read_toml

KEYS = ("title", "seeds", "metrics", "flags", "axes", "measure")
PLACES = ("out", "run")
"""Placeholders: the folder of the grid, and that of the run."""
MEASURED = (*PLACES, "data")
"""Placeholders of a measurement: also the prefix of the data that the run is validated on."""
# What the grid sets itself, and where it stands in the file.
OWN = dict.fromkeys(("run-dir", "resume"), "by the grid") | {
    "seed": "in seeds",
    **dict.fromkeys(("recipe", "config"), "by nothing: a grid is whole in its file"),
}
# Files and folders of the output beside those of the cells.
FILES = {"results.json", "table.csv", "table.md", "grid.png", "curves.png"}
_TAKEN = FILES | {"data", "grid.json"}


@dataclass(frozen=True)
class Cell:
    """One combination of points.

    Attributes:
        name: the points' names, with commas.
        points: axis -> point.
        flags: all flags of its runs but the seed.
        folder: its name in the grid's folder.
    """

    name: str
    points: dict[str, str]
    flags: Flags
    folder: str


@dataclass(frozen=True)
class GridFile:
    """A grid file that has no problem of form.

    Attributes:
        seeds: of every cell.
        metrics: columns of the table; "NAME/METRIC" is one of a measurement.
        axes: axis -> its points.
        measure: name -> words of a megasink command, with placeholders.
    """

    path: Path
    title: str
    seeds: list[int]
    metrics: list[str]
    axes: dict[str, list[str]]
    cells: list[Cell]
    measure: dict[str, list[str]]


def read_grid(path: Path) -> GridFile:
    """Read a grid file.

    Raises:
        ConfigError: lists every problem with its form.
        UserError: it is not TOML.
        OSError: it cannot be read.
    """
    told = read_toml(path)
    problems = [unknown_name("the key", key, KEYS) for key in told if key not in KEYS]
    values: list[Any] = [told.get(key) for key in KEYS[:3]]
    title, seeds, metrics = values
    if not isinstance(title, str) or not title:
        problems.append("title: give one, a string")
    problems += _seed_problems(seeds)
    if not _is_list(metrics, str) or not metrics:
        problems.append('metrics: give a list of names, such as ["valid_lm_loss", "imbalance"]')
    flags, axes = told.get("flags", {}), told.get("axes", {})
    problems += [*_flag_problems(flags, "flags"), *_axis_problems(axes)]
    measure = told.get("measure", {})
    problems += _measure_problems(measure)
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    cells = list(_cells(flags, axes))
    problems = list(_name_problems(cells))
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    commands = {name: _words(given["command"]) for name, given in measure.items()}
    points = {axis: list(of) for axis, of in axes.items()}
    return GridFile(path, title, seeds, metrics, points, cells, commands)


def data_of(cell: Cell) -> str | None:
    """Return the prefix of a cell's validation data, with its placeholders; None if not of one."""
    found = cell.flags.get("data-path") or cell.flags.get("valid-data-path")
    return found if isinstance(found, str) else None


def filled(words: Sequence[str], *, out: Path, run: Path, data: str = "") -> list[str]:
    """Return words with their placeholders filled in."""
    words = [word.replace("{data}", data) for word in words]
    places = {"out": str(out), "run": str(run)}
    return [re.sub(r"\{(\w+)\}", lambda found: places[found[1]], word) for word in words]


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _seed_problems(seeds: Any) -> list[str]:
    if not _is_list(seeds, int) or not seeds or min(seeds) < 0:
        return ["seeds: give a list of whole numbers from 0, such as [1, 2, 3]"]
    twice = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    return [f"seeds has {seed} twice: give each once" for seed in twice]


def _flag_problems(flags: Any, where: str) -> Iterator[str]:
    if not isinstance(flags, dict):
        yield f"{where} is {flags!r}: give flags, such as {{num-layers = 2}}"
        return
    for name, value in flags.items():
        if name in OWN:
            yield f"{where}.{name} is set {OWN[name]}: drop it"
        yield from (f"{where}.{name}{text}" for text in form_problems(name, value))
        values = value if isinstance(value, list) else [value]
        yield from (f"{where}.{name}: {text}" for text in _place_problems(map(str, values)))


def _place_problems(words: Any, places: Sequence[str] = PLACES) -> Iterator[str]:
    for word in words:
        for place in re.findall(r"\{(\w+)\}", word):
            if place not in places:
                yield unknown_name("the placeholder", place, places)


def _axis_problems(axes: Any) -> Iterator[str]:
    if not isinstance(axes, dict):
        yield f"axes is {axes!r}: give tables, such as [axes.attention]"
        return
    sets: dict[str, str] = {}  # flag -> the axis that sets it
    for axis, points in axes.items():
        if not isinstance(points, dict) or not points:
            yield f"axes.{axis}: give points, such as sink = {{attention-variant = 'sink'}}"
            continue
        for point, flags in points.items():
            yield from _flag_problems(flags, f"axes.{axis}.{point}")
        names = {name for of in points.values() if isinstance(of, dict) for name in of}
        for name in sorted(names):
            if name in sets:
                yield f"{name} is set by the axes {sets[name]} and {axis}: set it in one of them"
            sets[name] = axis


def _measure_problems(measure: Any) -> Iterator[str]:
    if not isinstance(measure, dict):
        yield f"measure is {measure!r}: give tables, such as [measure.heads]"
        return
    for name, given in measure.items():
        where = f"measure.{name}"
        if not re.fullmatch(r"\w[\w.-]*", name):
            yield f"{where}: use letters, digits, dots and dashes: it names a folder"
        if not isinstance(given, dict) or set(given) != {"command"}:
            yield f"{where}: give command, and no other key"
            continue
        command = given["command"]
        if not _is_list(command, str) and not isinstance(command, str):
            yield f"{where}.command is {command!r}: give a string, or a list of words"
            continue
        try:
            words = _words(command)
        except ValueError as error:  # a quotation mark without its other
            yield f"{where}.command {command!r}: {error}"
            continue
        yield from (f"{where}: {text}" for text in _place_problems(words, MEASURED))
        if f"{{run}}/{name}" not in words:
            yield f"{where}: the command does not write {{run}}/{name}: add --output {{run}}/{name}"


def _words(command: str | list[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else command


def _cells(flags: Flags, axes: Mapping[str, Mapping[str, Flags]]) -> Iterator[Cell]:
    for points in itertools.product(*(of.items() for of in axes.values())):
        names = [name for name, _ in points]
        together = dict(flags)
        for _, set_here in points:
            together |= set_here
        name = ", ".join(names) or "all"
        folder = re.sub(r"[^\w.+=-]+", "-", name).strip("-.")
        yield Cell(name, dict(zip(axes, names, strict=True)), together, folder)


def _name_problems(cells: Sequence[Cell]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for cell in cells:
        if cell.folder in seen or cell.folder in _TAKEN or not cell.folder:
            other = f", as has {seen[cell.folder]!r}" if cell.folder in seen else ""
            yield f"the cell {cell.name!r} has the folder {cell.folder!r}{other}: rename a point"
        seen[cell.folder] = cell.name
