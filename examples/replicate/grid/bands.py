"""Curves of a cell of a grid: the mean over seeds, and a band of one standard deviation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.replicate.grid.results import CellResults

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Band:
    """Mean and spread of a curve over seeds.

    Attributes:
        steps, mean, deviation: [points]; the deviation (n - 1) is 0 for one seed.
        alone: curves of seeds that diverged: (steps, values).
    """

    steps: Array
    mean: Array
    deviation: Array
    alone: list[tuple[Array, Array]]


def band_of(cell: CellResults, name: str) -> Band | None:
    """Return the mean of a curve over the seeds that did not diverge; None if there is no curve.

    It has the steps that all of these seeds have.
    """
    curves = {seed: run.curves[name] for seed, run in cell.runs.items() if name in run.curves}
    if not curves:
        return None
    arrays = {seed: np.asarray(curve, dtype=float) for seed, curve in curves.items()}
    whole = [array for seed, array in arrays.items() if int(seed) not in cell.diverged]
    alone = [(a[0], a[1]) for seed, a in arrays.items() if int(seed) in cell.diverged]
    if not whole:
        nothing = np.zeros(0)
        return Band(nothing, nothing, nothing, alone)
    steps = whole[0][0]
    for array in whole[1:]:
        steps = np.intersect1d(steps, array[0])
    values = np.stack([array[1][np.isin(array[0], steps)] for array in whole])
    deviation = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
    return Band(steps, values.mean(0), deviation, alone)


def draw_band(
    axis: Any,
    band: Band,
    color: Any,
    name: str,
    to_x: Callable[[Array], Array] | None = None,
    dashes: Any = "-",
) -> None:
    """Draw a mean with its band, and the seeds that diverged as thin dotted lines.

    Args:
        to_x: from steps to the horizontal axis; None for steps.
    """
    x = to_x(band.steps) if to_x else band.steps
    few = "o" if len(x) <= 10 else ""
    axis.plot(x, band.mean, color=color, label=name, marker=few, linestyle=dashes)
    low, high = band.mean - band.deviation, band.mean + band.deviation
    axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    for steps, values in band.alone:
        axis.plot(to_x(steps) if to_x else steps, values, color=color, linewidth=0.8, linestyle=":")
