"""How far two models' scores are apart (P3.21, P3.30).

Scores of any shape; NaN are left out.
"""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def wasserstein(a: Scores, b: Scores) -> float:
    """W1 between the distributions of two sets of scores, in the unit of the score (P3.21).

    The area between their empirical CDFs. Pool all samples, layers and heads of a model. Norms
    scale with the model: compare their layer-normalised forms.

    Raises:
        ValueError: no score in one of them.
    """
    a, b = _pooled(a), _pooled(b)
    every = np.sort(np.concatenate([a, b]))
    below_a = np.searchsorted(a, every[:-1], side="right") / len(a)
    below_b = np.searchsorted(b, every[:-1], side="right") / len(b)
    return float((np.abs(below_a - below_b) * np.diff(every)).sum())


def spearman(a: Scores, b: Scores) -> float:
    """Rank correlation of the same heads in two models of one shape (P3.30).

    NaN where all scores of one of them are equal.

    Raises:
        ValueError: other shapes.
    """
    together = _same_heads(a, b)
    ranks = [_ranks(x[together]) for x in (a, b)]
    centred = [r - r.mean() for r in ranks]
    size = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / size) if size else float("nan")


def top_agreement(a: Scores, b: Scores, count: int = 5) -> float:
    """IoU of the `count` highest heads of two models of one shape (P3.30).

    Raises:
        ValueError: other shapes.
    """
    together = _same_heads(a, b)
    first, second = (set(np.argsort(-x[together], kind="stable")[:count].tolist()) for x in (a, b))
    return len(first & second) / len(first | second)


def _pooled(scores: Scores) -> Scores:
    pooled = np.sort(scores[~np.isnan(scores)].ravel())
    if not len(pooled):
        raise ValueError("no score to compare")
    return pooled


def _ranks(values: Scores) -> Scores:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    mean_rank: Scores = (last - (counts - 1) / 2)[inverse]
    return mean_rank


def _same_heads(a: Scores, b: Scores) -> NDArray[np.bool_]:
    if a.shape != b.shape:
        raise ValueError(f"scores of shapes {a.shape} and {b.shape}: head by head, they must agree")
    return ~(np.isnan(a) | np.isnan(b))
