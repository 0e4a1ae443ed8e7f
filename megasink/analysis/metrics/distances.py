"""Distances between the scores of two models (P3.21, P3.30).

Scores have any shape; NaN is ignored. scipy.stats is imported late, as it takes a second.
"""

import warnings

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def wasserstein(a: Scores, b: Scores) -> float:
    """Return W1 between the distributions of two sets of scores, in the score's unit (P3.21).

    All samples, layers and heads of a model are pooled. Norms scale with the model: compare their
    layer-normalized forms.
    """
    from scipy.stats import wasserstein_distance

    pooled = [scores[~np.isnan(scores)] for scores in (a, b)]
    if not all(map(len, pooled)):
        raise ValueError("no score to compare")
    return float(wasserstein_distance(*pooled))


def spearman(a: Scores, b: Scores) -> float:
    """Return the rank correlation of the same heads in two models of one shape (P3.30).

    NaN if all scores of one model are equal.
    """
    from scipy.stats import ConstantInputWarning, spearmanr

    together = _same_heads(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)
        return float(spearmanr(a[together], b[together]).statistic)


def top_agreement(a: Scores, b: Scores, count: int = 5) -> float:
    """Return the IoU of the `count` highest heads of two models of one shape (P3.30)."""
    together = _same_heads(a, b)
    first, second = (set(np.argsort(-x[together], kind="stable")[:count].tolist()) for x in (a, b))
    return len(first & second) / len(first | second)


def _same_heads(a: Scores, b: Scores) -> NDArray[np.bool_]:
    if a.shape != b.shape:
        raise ValueError(f"scores of shapes {a.shape} and {b.shape}: head by head, they must agree")
    return ~(np.isnan(a) | np.isnan(b))
