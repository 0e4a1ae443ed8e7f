"""Evaluate curves of quality against the percentage of heads zeroed (P3.15, P3.16).

Both rules are those of the paper's released code, the source of its Table 2 and Figure 3.

Shapes: P points of a curve.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

ACCURACY_TOLERANCE = 1.0
"""Allowed drop in accuracy, in percentage points: the paper's "within 1%" (P3.15)."""

LOSS_TOLERANCE = 0.01
"""Allowed relative increase of the loss. The paper has no loss curves."""


class Removable(NamedTuple):
    """Return value of `removable`."""

    percent: float  # of heads, by the published rule; 0 for a curve that never meets the level
    # Whether every point keeps the level. The published rule then says 0, although at least the
    # largest percentage measured is removable.
    never_left: bool


def kept_level(baseline: float, *, higher_is_better: bool = True) -> float:
    """Return the lowest accuracy in percent, or the highest loss in nats, within the tolerance."""
    return baseline - ACCURACY_TOLERANCE if higher_is_better else baseline * (1 + LOSS_TOLERANCE)


def removable(
    percent_P: ArrayLike, value_P: ArrayLike, level: float, *, higher_is_better: bool = True
) -> Removable:
    """Return the largest percentage of heads at which the curve meets a level (P3.15).

    Crossings in either direction count, by linear interpolation, and points on the level; 0 if
    there are none. A segment next to a NaN meets nothing.
    """
    x_P, y_P = _sorted(percent_P, value_P)
    above_P = y_P - level if higher_is_better else level - y_P
    met = [float(x) for x, above in zip(x_P, above_P, strict=True) if above == 0]
    for i in range(len(x_P) - 1):
        here, there = above_P[i], above_P[i + 1]
        if here * there < 0:
            met.append(float(x_P[i] + here * (x_P[i + 1] - x_P[i]) / (here - there)))
    return Removable(max(met, default=0.0), bool((above_P > 0).all()))


def normalized_auc(percent_P: ArrayLike, value_P: ArrayLike, *, worst: float = 0.0) -> float:
    """Return the mean of a curve over its span (P3.16); `worst` for NaN or no span."""
    x_P, y_P = _sorted(percent_P, value_P)
    span = float(x_P[-1] - x_P[0])
    area = float(np.trapezoid(y_P, x_P))
    return worst if span == 0 or np.isnan(area) else area / span


def auc_weights(percent_P: ArrayLike) -> Floats:
    """Return [P]: the weight of each value in `normalized_auc`; NaN for a curve without a span."""
    x_P = np.asarray(percent_P, dtype=np.float64)
    unit_PP = np.eye(len(x_P))
    return np.asarray([normalized_auc(x_P, unit_P, worst=np.nan) for unit_P in unit_PP])


def interval(values_N: Floats, sizes_N: Floats, intervals: int = 1) -> tuple[float, float]:
    """Return a ratio of sums, and half its 95 % interval with Bonferroni's correction."""
    from scipy.stats import t  # takes a second

    ratio, count = values_N.sum() / sizes_N.sum(), len(values_N)
    quantile = t.ppf(1 - 0.025 / intervals, count - 1)
    return float(ratio), float(quantile * ratio_error(values_N, sizes_N))


def ratio_error(values_N: Floats, sizes_N: Floats) -> float:
    """Return the standard error of a ratio of sums over samples; NaN for a single one."""
    residual_N = values_N - values_N.sum() / sizes_N.sum() * sizes_N
    count = len(values_N)
    if count < 2:
        return np.nan
    return float(np.sqrt((residual_N**2).sum() * count / (count - 1)) / sizes_N.sum())


def ranks(aucs: Mapping[str, float], *, higher_is_better: bool = True) -> dict[str, int]:
    """Return the rank of each score, 1 the best; equal ones keep their order (P3.16)."""
    order: Sequence[str] = sorted(aucs, key=lambda name: aucs[name], reverse=higher_is_better)
    return {name: 1 + order.index(name) for name in aucs}


def _sorted(percent_P: ArrayLike, value_P: ArrayLike) -> tuple[Floats, Floats]:
    x_P, y_P = (np.asarray(values, dtype=np.float64) for values in (percent_P, value_P))
    if x_P.shape != y_P.shape or x_P.ndim != 1 or not len(x_P):
        raise ValueError(f"shapes {x_P.shape} and {y_P.shape}: give one value per percentage")
    order = np.argsort(x_P, kind="stable")
    return x_P[order], y_P[order]
