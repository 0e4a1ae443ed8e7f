"""The head-balance loss and head imbalance, as pure functions of head importance.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor


def head_balance_loss(
    importance_LH: Tensor, coeff: float, routed_LH: Tensor | None = None
) -> Tensor:
    """Return coeff * sum over layers of (number of routed heads) * CV^2, a differentiable scalar.

    Over all H heads this is Eq. 7 (P0.14), over the H - m routed heads Eq. 8 (P0.15).
    """
    heads: Tensor | int = importance_LH.shape[-1]
    if routed_LH is not None:
        heads = routed_LH.sum(-1, dtype=importance_LH.dtype)
    return (coeff * heads * squared_cv(importance_LH, routed_LH)).sum()


def head_balance_gradient(
    importance_LH: Tensor, coeff: float, routed_LH: Tensor | None = None
) -> Tensor:
    """Return dL/dImp of :func:`head_balance_loss`, [..., H]; 0 for shared heads.

    The gradient is 2 * coeff * [(Imp_h - mu) / mu^2 - var / mu^3], with mu and var over the n
    routed heads: the factor n of the loss cancels the 1/n of the mean.
    """
    mean, variance, routed = routed_moments(importance_LH, routed_LH)
    safe = mean.clamp_min(1e-12)
    gradient = 2 * coeff * ((importance_LH - mean) / safe.square() - variance / safe**3)
    return torch.where((mean > 0) & routed, gradient, 0.0)


def routed_heads(importance_LH: Tensor, shared: int) -> Tensor:
    """Return a mask of all but the `shared` most important heads; ties share the lower index."""
    order = importance_LH.sort(dim=-1, descending=True, stable=True).indices
    routed = torch.ones_like(importance_LH, dtype=torch.bool)
    return routed.scatter_(-1, order[..., :shared], False)


def squared_cv(importance_LH: Tensor, routed_LH: Tensor | None = None) -> Tensor:
    """Return CV^2 of each layer: population variance over squared mean (P0.13, Eq. 6).

    Head imbalance and the balance loss are based on it; it is differentiable.
    """
    mean, variance, _ = routed_moments(importance_LH, routed_LH)
    return torch.where(mean > 0, variance / mean.square().clamp_min(1e-38), 0.0).squeeze(-1)


def routed_moments(
    importance_LH: Tensor, routed_LH: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and population variance over the heads that count, [..., 1], and the mask."""
    if routed_LH is None:
        routed_LH = torch.ones_like(importance_LH, dtype=torch.bool)
    count = routed_LH.sum(-1, keepdim=True, dtype=importance_LH.dtype)
    mean = importance_LH.where(routed_LH, 0.0).sum(-1, keepdim=True) / count
    deviation = (importance_LH - mean).where(routed_LH, 0.0)
    return mean, deviation.square().sum(-1, keepdim=True) / count, routed_LH


def layer_imbalance(importance_LH: Tensor) -> Tensor:
    """Return population std / mean of head importance over the heads of a layer.

    NaN for a layer without attention (all NaN), which the mean over layers ignores; 0 for a layer
    whose heads are all closed.
    """
    present_LH = ~importance_LH.isnan()
    cv_L = squared_cv(importance_LH, present_LH).sqrt()
    return cv_L.masked_fill(~present_LH.any(-1), torch.nan)
