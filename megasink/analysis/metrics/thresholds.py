"""Masks of inactive heads from scores, and the agreement of masks (P3.11 to P3.20).

Shapes: N samples, L layers, H heads. Scores are NaN for missing heads.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]


def published_quantile(scores: Scores, share: float) -> float:
    """Return a quantile by the rule of the released code (P3.11), without NaN.

    The empirical CDF is F(x_(i)) = i / n at the i-th smallest score; its inverse is linear between
    them, and `share` is clamped to [1 / n, 1]. This is numpy's "interpolated_inverted_cdf", except
    that its n * share - 1 can miss whole numbers by rounding: here a share of i / n gives x_(i)
    exactly, so that a strict comparison never counts that head.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share {share}: between 0 and 1")
    ordered = np.sort(scores[~np.isnan(scores)].ravel())
    if not len(ordered):
        raise ValueError("no score to take a quantile of")
    share_of = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(np.interp(np.clip(share, share_of[0], 1.0), share_of, ordered))


def threshold(scores: Scores, share: float, side: str) -> float:
    """Return the threshold that makes about `share` of all heads, on one side, inactive (P3.11)."""
    return published_quantile(scores, 1 - share if side == "above" else share)


def inactive(scores: Scores, tau: float, side: str) -> Mask:
    """Return the heads strictly above or below a threshold; NaN is neither."""
    return scores > tau if side == "above" else scores < tau


def least_active(scores: Scores, share: float, side: str) -> Mask:
    """Return exactly the `share` (rounded down) of least active heads, ties by position.

    Comparing score functions needs masks of one size (P3.18).
    """
    flat = scores.ravel()
    present = np.flatnonzero(~np.isnan(flat))
    values = -flat[present] if side == "above" else flat[present]
    chosen = present[np.argsort(values, kind="stable")[: int(share * len(present))]]
    mask = np.zeros(flat.shape, dtype=bool)
    mask[chosen] = True
    return mask.reshape(scores.shape)


def agreement(masks: Sequence[Mask]) -> tuple[Scores, Scores]:
    """Return two [M, M] matrices over all pairs of M masks, samples pooled.

    IoU is |row and column| / |row or column| (P3.18), NaN if both are empty; precision is |row and
    column| / |row|, with the column as the truth (P3.19), NaN for an empty row.
    """
    both_MM = np.asarray([[np.count_nonzero(a & b) for b in masks] for a in masks])
    count_M = both_MM.diagonal()
    with np.errstate(invalid="ignore"):
        iou_MM = both_MM / (count_M[:, None] + count_M - both_MM)
        return iou_MM, both_MM / count_M[:, None]


def share_by_layer(mask_NLH: Mask, scores_NLH: Scores) -> Scores:
    """Return [L]: the share of each layer's heads that are inactive, over samples (P3.13, P3.20).

    NaN for layers without attention.
    """
    present = ~np.isnan(scores_NLH)
    heads_L = present.sum((0, 2))
    with np.errstate(invalid="ignore"):
        return np.asarray((mask_NLH & present).sum((0, 2)) / heads_L)
