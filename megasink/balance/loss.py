"""The head-balance loss, as a pure function of head importance.

CV^2 is shared with the head-imbalance metric in `diagnostics/importance.py`.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor

from megasink.diagnostics.importance import routed_moments, squared_cv


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
    """Return a mask of the heads not among the `shared` most important of their layer (P0.15).

    Args:
        importance_LH: [..., H].
        shared: m of Eq. 8, less than H.

    Returns:
        [..., H] bool, not differentiable. Ties are broken in favor of sharing the lower index.
    """
    order = importance_LH.sort(dim=-1, descending=True, stable=True).indices
    routed = torch.ones_like(importance_LH, dtype=torch.bool)
    return routed.scatter_(-1, order[..., :shared], False)
