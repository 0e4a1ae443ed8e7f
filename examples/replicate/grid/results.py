"""The files of a grid: one for each finished run, and results.json over all of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.files.checked_fields import from_json
from megasink.files.json_file import read_object

FORMAT = 1
"""Incremented when an entry moves or changes its meaning."""
RESULTS = "results.json"


@dataclass(kw_only=True)
class RunRecord:
    """Contents of CELL/seed-N.json: one finished run.

    Attributes:
        cell: the names of its points; points: axis -> point.
        flags: of `megasink train` by flat name, without the seed, with placeholders.
        measure: measurement -> words of its command, with placeholders.
        metrics: final numbers; "NAME/METRIC" is one of a measurement. A run that diverged has
            steps, spikes and diverged alone.
        curves: name -> [steps, values], at most 100 points.
        seconds, cpu_seconds: of training and measurements, with all starts of an interrupted run.
        start: how its processes were started, "fork" or "launch".
        threads: of torch in each rank; None for a launched run, which follows OMP_NUM_THREADS.
        versions, hardware, date: of the machine that finished it.
    """

    format: int
    cell: str
    points: dict[str, str]
    seed: int
    flags: dict[str, Any]
    measure: dict[str, list[str]]
    metrics: dict[str, Any]
    curves: dict[str, list[list[float | None]]]
    seconds: float
    cpu_seconds: float
    start: str
    threads: int | None
    versions: dict[str, str]
    hardware: str
    date: str

    @property
    def diverged(self) -> bool:
        """Whether training diverged; then it has no final loss."""
        return bool(self.metrics["diverged"])


@dataclass(kw_only=True)
class Spread:
    """A metric of a cell over its seeds.

    Attributes:
        count: seeds that have it.
        mean: over them.
        standard_deviation: with n - 1; null for one seed.
        values: seed -> value.
    """

    count: int
    mean: float
    standard_deviation: float | None
    values: dict[str, float]


@dataclass(kw_only=True)
class CellResults:
    """The runs of one cell.

    Attributes:
        points: axis -> point.
        metrics: metric -> its spread over seeds, for those that are numbers.
        diverged: seeds whose training diverged.
        missing: seeds without a finished run, with the reason where there is one.
        runs: seed -> its record.
    """

    points: dict[str, str]
    metrics: dict[str, Spread]
    diverged: list[int]
    missing: dict[str, str]
    runs: dict[str, RunRecord]

    @property
    def cpu_minutes(self) -> float:
        """CPU time of all its finished runs."""
        return sum(run.cpu_seconds for run in self.runs.values()) / 60


@dataclass(kw_only=True)
class GridResults:
    """Contents of results.json.

    Attributes:
        metrics: columns of the table.
        axes: axis -> its points.
        cells: name -> its results, in the order of the grid file.
        versions, hardware: all that its runs had.
        date: of the newest run; "" if none is finished.
    """

    format: int
    title: str
    seeds: list[int]
    metrics: list[str]
    axes: dict[str, list[str]]
    cells: dict[str, CellResults]
    versions: dict[str, list[str]]
    hardware: list[str]
    date: str


def cell_results(
    points: dict[str, str], records: Sequence[RunRecord], missing: Mapping[int, str]
) -> CellResults:
    """Summarize the finished runs of a cell."""
    names = list(dict.fromkeys(name for record in records for name in record.metrics))
    spreads = {}
    for name in names:
        values = {
            str(record.seed): float(value)
            for record in records
            if isinstance(value := record.metrics.get(name), int | float)
            and not isinstance(value, bool)
        }
        if values:
            spreads[name] = spread(values)
    return CellResults(
        points=points,
        metrics=spreads,
        diverged=[record.seed for record in records if record.diverged],
        missing={str(seed): why for seed, why in missing.items()},
        runs={str(record.seed): record for record in records},
    )


def spread(values: Mapping[str, float]) -> Spread:
    """Summarize values by seed: mean, standard deviation with n - 1."""
    numbers = list(values.values())
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
    return Spread(
        count=len(numbers),
        mean=statistics.fmean(numbers),
        standard_deviation=deviation,
        values=dict(values),
    )


def grid_results(
    title: str,
    seeds: list[int],
    metrics: list[str],
    axes: dict[str, list[str]],
    cells: dict[str, CellResults],
) -> GridResults:
    """Collect the cells of a grid."""
    records = [record for cell in cells.values() for record in cell.runs.values()]
    return GridResults(
        format=FORMAT,
        title=title,
        seeds=seeds,
        metrics=metrics,
        axes=axes,
        cells=cells,
        versions=_distinct(record.versions.items() for record in records),
        hardware=sorted({record.hardware for record in records}),
        date=max((record.date for record in records), default=""),
    )


def _distinct(items: Iterable[Iterable[tuple[str, str]]]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for entries in items:
        for name, version in entries:
            found.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in found.items()}


def read_results(folder: Path) -> GridResults:
    """Read the results.json of a grid.

    Raises:
        UserError: it is missing, or not one of this version.
    """
    return _read(GridResults, folder / RESULTS)


def read_record(path: Path) -> RunRecord:
    """Read the file of a finished run.

    Raises:
        UserError: it is missing, or not one of this version.
    """
    return _read(RunRecord, path)


def _read[T](kind: type[T], path: Path) -> T:
    told = read_object(path)
    if told.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {told.get('format')!r}, not {FORMAT}: repeat the grid with this "
            "version of megasink"
        )
    read: T = from_json(kind, told, str(path))
    return read
