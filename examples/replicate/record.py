"""The results file of an experiment: results/NAME-FORM.json, the only source of results.md."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.replicate.claims import Verdict
from examples.replicate.cone import Check
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import from_json, to_json
from megasink.files.json_file import read_object

FORMAT = 1
"""Incremented when an entry moves or changes its meaning."""
FOLDER = Path(__file__).parent / "results"
DIGITS = 5
"""Significant digits that are kept: the seeds differ in the second or third."""


@dataclass(kw_only=True)
class Run:
    """One finished run, or the measurements of one.

    Attributes:
        metrics: metric -> its number, or a name.
        curves: curve -> its steps and values.
        seconds, cpu_seconds: that it took.
    """

    cell: str
    seed: int
    metrics: Mapping[str, Any]
    curves: Mapping[str, tuple[Sequence[float], Sequence[float | None]]]
    seconds: float
    cpu_seconds: float


@dataclass(kw_only=True)
class Curve:
    """A curve of a cell: mean and standard deviation (n - 1) over seeds, at common steps."""

    steps: list[float]
    mean: list[float | None]
    deviation: list[float | None]


@dataclass(kw_only=True)
class Large:
    """What only a large model shows, and the command for a GPU node."""

    says: str
    command: str


@dataclass(kw_only=True)
class Result:
    """Contents of a results file.

    Attributes:
        experiment, form: its folder's letter, "fast" or "full".
        rows: of docs/papers.md.
        prediction, predicted: what was expected, and the date; written before the first run.
        date: of the results (ISO 8601).
        versions: package -> version; hardware: of the machine.
        seconds, cpu_seconds: sums over the runs; runs: their number.
        metrics: columns of the table; cells: cell -> metric -> value by seed.
        curves: curve -> cell -> curve; x: what their horizontal axis is.
        maps: cell -> [layer][head] of the first seed.
        checks: closed forms against Monte Carlo.
    """

    format: int = FORMAT
    experiment: str
    form: str
    title: str
    rows: list[str]
    setting: str
    prediction: str
    predicted: str
    date: str
    versions: dict[str, str]
    hardware: str
    seconds: float
    cpu_seconds: float
    runs: int
    seeds: list[int]
    metrics: list[str]
    cells: dict[str, dict[str, list[float | None]]]
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    x: str = "step"
    maps: dict[str, list[list[float | None]]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    verdicts: list[Verdict]
    large: list[Large] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its file and figure."""
        return f"{self.experiment}-{self.form}"


def read_result(path: Path) -> Result:
    """Read a results file.

    Raises:
        UserError: it is not one, or has another format.
    """
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise UserError(f"{path} has format {content.get('format')}; this version reads {FORMAT}")
    result: Result = from_json(Result, content, str(path))
    return result


def write_result(result: Result, folder: Path = FOLDER) -> Path:
    """Write the results file, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    atomic_text(path, json.dumps(to_json(result), indent=1, ensure_ascii=False) + "\n")
    return path


def read_results(folder: Path = FOLDER) -> list[Result]:
    """Read all results files, by experiment, the full form before the fast one."""
    found = [read_result(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: (result.experiment, result.form != "full"))


def rounded(number: float | str | None, digits: int = DIGITS) -> float | None:
    """Return a number with few significant digits; None for a name, or if it is not finite."""
    if number is None or isinstance(number, str) or not np.isfinite(number):
        return None
    return float(f"{number:.{digits}g}")


def by_cell(runs: Sequence[Run], names: Sequence[str]) -> dict[str, dict[str, list[float | None]]]:
    """Return cell -> metric -> values in the order of the runs."""
    cells: dict[str, dict[str, list[float | None]]] = {}
    for run in runs:
        row = cells.setdefault(run.cell, {name: [] for name in names})
        for name in names:
            row[name].append(rounded(run.metrics.get(name)))
    return cells


def curve_of(runs: Sequence[Run], name: str) -> Curve | None:
    """Return mean and deviation of a curve over runs; None if no run has it.

    Values are interpolated between the steps of the first run; beyond the end of a run, as after a
    divergence, it does not count.
    """
    lines = [finite_curve(run, name) for run in runs if name in run.curves]
    lines = [line for line in lines if len(line[0])]
    if not lines:
        return None
    steps = lines[0][0]
    values = np.array([np.interp(steps, *line, left=np.nan, right=np.nan) for line in lines])
    count = np.isfinite(values).sum(0)
    safe = np.where(np.isfinite(values), values, 0.0)
    mean = np.divide(safe.sum(0), count, out=np.full(len(steps), np.nan), where=count > 0)
    squares = np.where(np.isfinite(values), (values - mean) ** 2, 0.0).sum(0)
    spread = np.sqrt(
        np.divide(squares, count - 1, out=np.full(len(steps), np.nan), where=count > 1)
    )
    return Curve(
        steps=[float(step) for step in steps],
        mean=[rounded(float(x)) for x in mean],
        deviation=[rounded(float(x)) for x in spread],
    )


def value_at(run: Run, name: str, percent: float) -> float | None:
    """Return a curve's value after a share of the steps; None beyond its ends."""
    steps, values = finite_curve(run, name)
    if not len(steps) or name not in run.curves:
        return None
    at = percent / 100 * run.curves[name][0][-1]
    return rounded(float(np.interp(at, steps, values, left=np.nan, right=np.nan)))


def finite_curve(run: Run, name: str) -> tuple[Any, Any]:
    """Return steps and values of a curve where it is finite."""
    steps, values = (
        np.array([np.nan if x is None else x for x in column], dtype=np.float64)
        for column in run.curves.get(name, ([], []))
    )
    there = np.isfinite(values)
    return steps[there], values[there]
