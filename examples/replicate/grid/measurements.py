"""The commands that may measure a run of a grid, and the numbers that each of them leaves."""

import csv
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.analysis.result_schemas import ALL, AblationResults
from megasink.files.checked_fields import from_json
from megasink.files.json_file import read_object

Numbers = dict[str, float | str | None]
Curves = dict[str, list[list[float | None]]]


@dataclass(frozen=True)
class Measurement:
    """What a command leaves in its output folder.

    Attributes:
        file: is there when the command has finished.
        read: folder -> (numbers by metric, curves by metric: [steps, values]).
        metrics: words of the command -> every metric that it can yield.
    """

    file: str
    read: Callable[[Path], tuple[Numbers, Curves]]
    metrics: Callable[[Sequence[str]], list[str]]


def _of_models(words: Sequence[str]) -> list[str]:
    from megasink.analysis.metrics import metrics

    return [*metrics(), "average_perplexity"]


def _of_traces(words: Sequence[str]) -> list[str]:
    from megasink.analysis.metrics import metrics_shown

    return ["tokens", *metrics_shown("scalar")]


def _of_ablations(words: Sequence[str]) -> list[str]:
    """Return a metric for each percentage of --zeroed."""
    behind = words[words.index("--zeroed") + 1 :] if "--zeroed" in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("--"), behind))


def _analysis(folder: Path) -> tuple[Numbers, Curves]:
    told = read_object(folder / "results.json")
    numbers = _summaries(told["metrics"])
    if told.get("average_perplexity") is not None:
        numbers["average_perplexity"] = told["average_perplexity"]
    if len(told["datasets"]) > 1:
        for name, of in told["datasets"].items():
            numbers |= {f"{name}/{key}": value for key, value in _summaries(of["metrics"]).items()}
    return numbers, {}


def _summaries(metrics: dict[str, Any]) -> Numbers:
    return {name: of["number"] for name, of in metrics.items() if of["number"] is not None}


def _trace(folder: Path) -> tuple[Numbers, Curves]:
    """The numbers of the last checkpoint, and every metric over the checkpoints.

    A category, such as the stage of the circuit, is a number from 0 in its curve (P4.23).
    """
    with (folder / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    from megasink.analysis.metrics import metrics

    steps: list[float | None] = [float(row["step"]) for row in rows]
    levels = {name: entry.levels for name, entry in metrics().items()}
    numbers: Numbers = {}
    curves: Curves = {}
    for name in rows[0].keys() - {"step"}:
        values = [_number(row[name], levels.get(name, ())) for row in rows]
        is_number = values[-1] is not None and rows[-1][name] not in levels.get(name, ())
        numbers[name] = values[-1] if is_number else rows[-1][name]
        if any(value is not None for value in values):
            curves[name] = [steps, values]
    return {name: value for name, value in numbers.items() if value != ""}, curves


def _ablation(folder: Path) -> tuple[Numbers, Curves]:
    """Return the loss in nats by SCORE/PERCENT of heads to zero, the mean over baseline seeds."""
    path = folder / "ablation.json"
    told: AblationResults = from_json(AblationResults, read_object(path), str(path))
    losses: dict[str, list[float]] = {}
    for point in told.points:
        on = ALL if ALL in point.values else next(iter(point.values))
        if point.asked is not None:
            losses.setdefault(f"{point.row}/{point.asked:g}", []).append(point.number(on))
    return {name: statistics.fmean(values) for name, values in losses.items()}, {}


def _number(text: str, levels: Sequence[str]) -> float | None:
    if text in levels:
        return float(levels.index(text))
    return float(text) if text else None


MEASUREMENTS = {
    "analyze": Measurement("results.json", _analysis, _of_models),
    "analyze --checkpoints": Measurement("trace.csv", _trace, _of_traces),
    "ablate": Measurement("ablation.json", _ablation, _of_ablations),
}
"""By command of megasink."""


def measurement_of(words: Sequence[str]) -> Measurement | None:
    """Return what the command of these words leaves; None for one that measures nothing."""
    flag = " --checkpoints" if "--checkpoints" in words else ""
    return MEASUREMENTS.get(f"{words[0]}{flag}")
