"""The head-balance loss, as a pure function of head importance.

What it is made of, CV^2, is that of head imbalance: `diagnostics/importance.py`.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor

from megasink.diagnostics.importance import routed_moments, squared_cv


def head_balance_loss(
    importance_LH: Tensor, coeff: float, routed_LH: Tensor | None = None
) -> Tensor:
    """coeff * sum over layers of (routed heads) * CV^2 over them; a scalar, differentiable.

    Over all H heads it is Eq. 7 (P0.14), over the H - m routed ones Eq. 8 (P0.15).
    """
    heads: Tensor | int = importance_LH.shape[-1]
    if routed_LH is not None:
        heads = routed_LH.sum(-1, dtype=importance_LH.dtype)
    return (coeff * heads * squared_cv(importance_LH, routed_LH)).sum()


def head_balance_gradient(
    importance_LH: Tensor, coeff: float, routed_LH: Tensor | None = None
) -> Tensor:
    """dL/dImp of :func:`head_balance_loss`, [..., H]; 0 for shared heads.

    2 * coeff * [(Imp_h - mu) / mu^2 - var / mu^3], with mu and var over the n heads that count:
    the factor n of the loss cancels the 1/n of the mean.
    """
    mean, variance, routed = routed_moments(importance_LH, routed_LH)
    safe = mean.clamp_min(1e-12)
    gradient = 2 * coeff * ((importance_LH - mean) / safe.square() - variance / safe**3)
    return torch.where((mean > 0) & routed, gradient, 0.0)


def routed_heads(importance_LH: Tensor, shared: int) -> Tensor:
    """The heads that are not among the `shared` most important ones of their layer (P0.15).

    Args:
        importance_LH: [..., H].
        shared: m of Eq. 8, less than H.

    Returns:
        [..., H] bool. Of equally important heads the one of the lower index is shared first. The
        choice is not differentiated.
    """
    order = importance_LH.sort(dim=-1, descending=True, stable=True).indices
    routed = torch.ones_like(importance_LH, dtype=torch.bool)
    return routed.scatter_(-1, order[..., :shared], False)
