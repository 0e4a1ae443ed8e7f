"""Masks of inactive heads from scores, their agreement, and distances between two models (P3).

Shapes: N samples, L layers, H heads. Scores are NaN for missing heads. scipy.stats is imported
late, as it takes a second.
"""

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]


def published_quantile(scores: Scores, share: float) -> float:
    """Return a quantile by the rule of the released code (P3.11), without NaN."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}: use a number between 0 and 1")
    ordered = np.sort(scores[~np.isnan(scores)].ravel())
    if not len(ordered):
        raise ValueError("no scores to take a quantile of")
    # As numpy's "interpolated_inverted_cdf", but a share of i / n gives the i-th smallest score
    # exactly, whatever the rounding, so that a strict comparison never counts that head.
    share_of = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(np.interp(np.clip(share, share_of[0], 1.0), share_of, ordered))


def threshold(scores: Scores, share: float, side: str) -> float:
    """Return the threshold that makes about `share` of all heads, on one side, inactive (P3.11)."""
    return published_quantile(scores, 1 - share if side == "above" else share)


def inactive(scores: Scores, tau: float, side: str) -> Mask:
    """Return the heads strictly above or below a threshold; NaN is neither."""
    return scores > tau if side == "above" else scores < tau


def least_active(scores: Scores, share: float, side: str) -> Mask:
    """Return exactly the `share` (rounded down) of least active heads, ties by position (P3.18)."""
    flat = scores.ravel()
    present = np.flatnonzero(~np.isnan(flat))
    values = -flat[present] if side == "above" else flat[present]
    chosen = present[np.argsort(values, kind="stable")[: int(share * len(present))]]
    mask = np.zeros(flat.shape, dtype=bool)
    mask[chosen] = True
    return mask.reshape(scores.shape)


def agreement(masks: Sequence[Mask]) -> tuple[Scores, Scores]:
    """Return [M, M] IoU (P3.18) and precision |row and column| / |row| (P3.19); NaN if empty."""
    both_MM = np.asarray([[np.count_nonzero(a & b) for b in masks] for a in masks])
    count_M = both_MM.diagonal()
    with np.errstate(invalid="ignore"):
        iou_MM = both_MM / (count_M[:, None] + count_M - both_MM)
        return iou_MM, both_MM / count_M[:, None]


def share_by_layer(mask_NLH: Mask, scores_NLH: Scores) -> Scores:
    """Return [L]: the share of each layer's heads that are inactive over samples (P3.13, P3.20)."""
    present = ~np.isnan(scores_NLH)
    heads_L = present.sum((0, 2))
    with np.errstate(invalid="ignore"):
        return np.asarray((mask_NLH & present).sum((0, 2)) / heads_L)


def wasserstein(a: Scores, b: Scores) -> float:
    """Return W1 between all scores of two models, in the score's unit (P3.21)."""
    from scipy.stats import wasserstein_distance

    pooled = [scores[~np.isnan(scores)] for scores in (a, b)]
    if not all(map(len, pooled)):
        raise ValueError("no scores to compare")
    return float(wasserstein_distance(*pooled))


def spearman(a: Scores, b: Scores) -> float:
    """Return the rank correlation of heads in two models (P3.30); NaN if one's are equal."""
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


def _same_heads(a: Scores, b: Scores) -> Mask:
    if a.shape != b.shape:
        raise ValueError(f"scores of shapes {a.shape} and {b.shape}: use models of the same shape")
    return ~(np.isnan(a) | np.isnan(b))
