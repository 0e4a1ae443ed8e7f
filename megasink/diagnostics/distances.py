"""How far two models' scores are apart (P3.21, P3.30).

Shapes: any; scores are pooled, NaN left out.
"""

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


def wasserstein(a: Scores, b: Scores) -> float:
    """W1 between the distributions of two sets of scores, in the unit of the score (P3.21).

    Pool all samples, layers and heads of a model. Norms scale with the model: compare their
    layer-normalised forms.
    """
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(_pooled(a), _pooled(b)))


def spearman(a: Scores, b: Scores) -> float:
    """Rank correlation of the same heads in two models of one shape (P3.30).

    Raises:
        ValueError: other shapes.
    """
    from scipy.stats import spearmanr

    together = _same_heads(a, b)
    return float(spearmanr(a[together], b[together]).statistic)


def top_agreement(a: Scores, b: Scores, count: int = 5) -> float:
    """IoU of the `count` highest heads of two models of one shape (P3.30).

    Raises:
        ValueError: other shapes.
    """
    together = _same_heads(a, b)
    highest = [set(np.argsort(-x[together], kind="stable")[:count]) for x in (a, b)]
    return len(highest[0] & highest[1]) / len(highest[0] | highest[1])


def _pooled(scores: Scores) -> Scores:
    pooled = scores[~np.isnan(scores)].ravel()
    if not len(pooled):
        raise ValueError("no score to compare")
    return pooled


def _same_heads(a: Scores, b: Scores) -> NDArray[np.bool_]:
    if a.shape != b.shape:
        raise ValueError(f"scores of shapes {a.shape} and {b.shape}: head by head, they must agree")
    return ~(np.isnan(a) | np.isnan(b))
