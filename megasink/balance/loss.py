"""Head imbalance and the head-balance loss, as pure functions of head importance.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor


def squared_cv(importance_LH: Tensor) -> Tensor:
    """CV^2 of each layer: population variance over squared mean (P0.13, Eq. 6).

    Args:
        importance_LH: [..., H] mean gate of each head, float32 or float64.

    Returns:
        [...], dimensionless; 0 for a layer whose heads are all closed (mean 0).
    """
    mean = importance_LH.mean(-1)
    variance = importance_LH.var(-1, unbiased=False)
    return torch.where(mean > 0, variance / mean.square().clamp_min(1e-38), 0.0)


def head_imbalance(importance_LH: Tensor) -> Tensor:
    """Mean over layers of CV (P0.13, Eq. 6); a scalar."""
    return squared_cv(importance_LH).sqrt().mean()


def head_balance_loss(importance_LH: Tensor, coeff: float) -> Tensor:
    """coeff * sum over layers of H * CV^2 (P0.14, Eq. 7); a scalar, differentiable."""
    return coeff * importance_LH.shape[-1] * squared_cv(importance_LH).sum()


def head_balance_gradient(importance_LH: Tensor, coeff: float) -> Tensor:
    """dL/dImp of :func:`head_balance_loss`, [..., H].

    2 * coeff * [(Imp_h - mu) / mu^2 - var / mu^3], with mu and var over the H heads: the factor H
    of Eq. 7 cancels the 1/H of the mean.
    """
    mean = importance_LH.mean(-1, keepdim=True)
    variance = importance_LH.var(-1, unbiased=False, keepdim=True)
    safe = mean.clamp_min(1e-12)
    gradient = 2 * coeff * ((importance_LH - mean) / safe.square() - variance / safe**3)
    return torch.where(mean > 0, gradient, 0.0)
