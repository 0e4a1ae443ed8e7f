"""Head imbalance and the head-balance loss, as pure functions of head importance.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor


def squared_cv(importance_LH: Tensor, routed_LH: Tensor | None = None) -> Tensor:
    """CV^2 of each layer: population variance over squared mean (P0.13, Eq. 6).

    Args:
        importance_LH: [..., H] mean gate of each head, float32 or float64.
        routed_LH: [..., H] True for the heads that count (P0.15); None for all. At least one each.

    Returns:
        [...], dimensionless; 0 for a layer whose heads are all closed (mean 0).
    """
    mean, variance, _ = _moments(importance_LH, routed_LH)
    return torch.where(mean > 0, variance / mean.square().clamp_min(1e-38), 0.0).squeeze(-1)


def head_imbalance(importance_LH: Tensor) -> Tensor:
    """Mean over layers of CV (P0.13, Eq. 6); a scalar."""
    return squared_cv(importance_LH).sqrt().mean()


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
    mean, variance, routed = _moments(importance_LH, routed_LH)
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


def _moments(importance_LH: Tensor, routed_LH: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and population variance over the heads that count, each [..., 1], and the mask."""
    if routed_LH is None:
        routed_LH = torch.ones_like(importance_LH, dtype=torch.bool)
    count = routed_LH.sum(-1, keepdim=True, dtype=importance_LH.dtype)
    mean = importance_LH.where(routed_LH, 0.0).sum(-1, keepdim=True) / count
    deviation = (importance_LH - mean).where(routed_LH, 0.0)
    return mean, deviation.square().sum(-1, keepdim=True) / count, routed_LH
