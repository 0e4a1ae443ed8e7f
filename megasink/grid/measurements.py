"""The commands that may measure a run of a grid, and the numbers that each of them leaves."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.json_file import read_object

Numbers = dict[str, float | str | None]
Curves = dict[str, list[list[float | None]]]


@dataclass(frozen=True)
class Measurement:
    """What a command leaves in its output folder.

    Attributes:
        file: is there when the command has finished.
        read: folder -> (numbers by metric, curves by metric: [steps, values]).
        metrics: every metric that it can yield; None if that depends on the model or the tasks.
    """

    file: str
    read: Callable[[Path], tuple[Numbers, Curves]]
    metrics: Callable[[], list[str]] | None = None


def _of_models() -> list[str]:
    from megasink.diagnostics import metrics

    return [*metrics(), "average_perplexity"]


def _of_traces() -> list[str]:
    from megasink.diagnostics import metrics_shown

    return ["tokens", *metrics_shown("scalar")]


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


def _ablation(folder: Path) -> tuple[Numbers, Curves]:
    """Of a single dataset or task SCORE/auc and so on, of several ON/SCORE/auc."""
    told = read_object(folder / "ablation.json")
    several = len({curve["on"] for curve in told["curves"]}) > 1
    numbers: Numbers = {}
    for curve in told["curves"]:
        prefix = f"{curve['on']}/" * several + curve["score"]
        numbers |= {f"{prefix}/{key}": curve[key] for key in ("auc", "rank", "removable")}
    for point in told["points"]:
        for on, of in point["values"].items():
            prefix = f"{on}/" * (len(point["values"]) > 1) + point["label"]
            numbers |= {f"{prefix}/{key}": of[key] for key in ("value", "change")}
    return numbers, {}


def _sweep(folder: Path) -> tuple[Numbers, Curves]:
    """LENGTH/bos-add/1-copies/METRIC, without the parts that are the same in every row."""
    rows = read_object(folder / "sweep.json")["rows"]
    words = {"length": "{} tokens", "bos": "bos {}", "copies": "copies {}"}
    varied = [key for key in words if len({row[key] for row in rows}) > 1]
    numbers: Numbers = {}
    for row in rows:
        where = "".join(f"{words[key].format(row[key])}/" for key in varied)
        shares = {f"inactive_{score}": share for score, share in row["inactive"].items()}
        found = _summaries(row["metrics"]) | shares
        numbers |= {f"{where}{name}": value for name, value in found.items()}
    return numbers, {}


def _evaluation(folder: Path) -> tuple[Numbers, Curves]:
    """TASK/METRIC."""
    tasks = read_object(folder / "evaluation.json")["tasks"]
    return {
        f"{task}/{metric}": score["value"]
        for task, of in tasks.items()
        for metric, score in of["metrics"].items()
    }, {}


def _trace(folder: Path) -> tuple[Numbers, Curves]:
    """The numbers of the last checkpoint, and every metric over the checkpoints."""
    with (folder / "trace.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps: list[float | None] = [float(row["step"]) for row in rows]
    numbers: Numbers = {}
    curves: Curves = {}
    for name in rows[0].keys() - {"step"}:
        values = [_number(row[name]) for row in rows]
        numbers[name] = rows[-1][name] if values[-1] is None else values[-1]
        if any(value is not None for value in values):
            curves[name] = [steps, values]
    return {name: value for name, value in numbers.items() if value != ""}, curves


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # the name of a category, or nothing
        return None


MEASUREMENTS = {
    "analyze": Measurement("results.json", _analysis, _of_models),
    "ablate": Measurement("ablation.json", _ablation),
    "sweep": Measurement("sweep.json", _sweep),
    "evaluate": Measurement("evaluation.json", _evaluation),
    "trace": Measurement("trace.csv", _trace, _of_traces),
}
"""By command of megasink."""
