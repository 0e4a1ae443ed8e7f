"""Final numbers and curves of a finished run, from its folder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.replicate.grid.measurements import Curves, measurement_of
from megasink.errors import UserError
from megasink.figures.loss_spikes import loss_spikes
from megasink.figures.run_figure import SMOOTHED, series, smoothed
from megasink.figures.run_metrics import read_metrics

POINTS = 100
"""Of a curve, at most."""
EVALUATED = tuple(
    f"{split}_{name}"
    for split in ("valid", "test")
    for name in ("lm_loss", "bits_per_byte", "sink_rate_first_key", "sink_rate_slot")
)
TRAINED = ("imbalance", "balance_loss", "balance_gradient_ratio", "grad_norm", "tokens")
COUNTS = ("steps", "spikes", "diverged")
NAMES = ("lm_loss", *EVALUATED, *TRAINED, *COUNTS)
"""Metrics of training."""


def collect(
    run: Path, measure: Mapping[str, Sequence[str]], *, diverged: bool
) -> tuple[dict[str, Any], Curves]:
    """Return the metrics and the curves of a finished run.

    Args:
        measure: measurement -> words of its command; its output is RUN/MEASUREMENT.
        diverged: training ended because of it; a last loss of NaN counts, too.

    Raises:
        UserError: a file is missing or not readable.
    """
    lines = read_metrics(run)
    metrics, curves = of_training(lines, diverged=diverged)
    if metrics["diverged"]:
        return metrics, curves
    for name, words in measure.items():
        measurement = measurement_of(words)
        assert measurement is not None  # the plan has refused others
        try:
            numbers, traced = measurement.read(run / name)
        except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{run / name} cannot be read: {error!r}") from error
        metrics |= {f"{name}/{metric}": value for metric, value in numbers.items()}
        curves |= {f"{name}/{metric}": curve for metric, curve in traced.items()}
    return metrics, curves


def of_training(
    lines: list[dict[str, Any]], *, diverged: bool = False
) -> tuple[dict[str, Any], Curves]:
    """Return the metrics and curves in the lines of a metrics.jsonl."""
    steps, loss = series(lines, "lm_loss")
    diverged = diverged or not np.isfinite(loss[-1])
    curves: Curves = {}
    finals: dict[str, Any] = {}
    for key in ("lm_loss", *EVALUATED, *TRAINED):
        rows = [line for line in lines if isinstance(line.get(key), int | float)]
        if not rows:
            continue
        where, values = series(rows, key)
        if key in SMOOTHED:
            values = smoothed(values)
        curves[key] = thinned(where, values)
        finals[key] = _finite(values[-1])
    counts = {"steps": int(steps[-1]), "spikes": len(loss_spikes(loss)), "diverged": diverged}
    return (counts if diverged else finals | counts), curves


def thinned(steps: NDArray[np.float64], values: NDArray[np.float64]) -> list[list[float | None]]:
    """Return [steps, values] with at most `POINTS` points, the last among them."""
    every = max(1, math.ceil(len(steps) / POINTS))
    kept = np.arange(len(steps) - 1, -1, -every)[::-1]
    return [[float(step) for step in steps[kept]], [_finite(value) for value in values[kept]]]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
