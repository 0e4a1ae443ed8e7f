"""The head-balance loss and head imbalance, as pure functions of head importance; its options.

Shapes: L layers, H query heads.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megasink.attention.variants import Variant


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

    NaN for a layer without attention (all NaN); 0 for a layer whose heads are all closed.
    """
    present_LH = ~importance_LH.isnan()
    cv_L = squared_cv(importance_LH, present_LH).sqrt()
    return cv_L.masked_fill(~present_LH.any(-1), torch.nan)


Given = Mapping[str, float]
"""{name: value} of the coefficient, the shared heads and their refresh, in this order."""


def wrong_alone(given: Given) -> list[str]:
    """Return one sentence, with the caller's name, for each option that is not a number >= 0."""
    return [
        f"{name} {value} is {'negative' if value < 0 else 'not finite'}: use 0 or more"
        for name, value in given.items()
        if not 0 <= value < math.inf
    ]


def wrong_together(given: Given, heads: int | None) -> list[str]:
    """Return one sentence for each conflict between options, or with the model."""
    _, (of_shared, shared), (of_refresh, refresh) = given.items()
    problems = []
    if heads and 0 < shared > heads - 2:
        problems.append(
            f"{of_shared} {shared} of {heads} heads leaves fewer than two to balance: use at most "
            f"{max(0, heads - 2)}"
        )
    if refresh > 0 and not shared:
        problems.append(f"{of_refresh} {refresh} has no effect without {of_shared}: set both")
    return problems


def without_gradient(given: Given, record: Variant, similarity: str) -> list[str]:
    """Return why attention of this variant and similarity has no gate to train, a sentence each."""
    (name, coeff), *_ = given.items()
    problems = []
    if similarity != "softmax":
        problems.append(f"similarity {similarity} has no gradient (importance is a proxy, P2.37)")
    if record.slot_value is None:
        problems.append(f"the record of variant {record.name!r} needs slot_value for the gradient")
    return [f"{name} {coeff}: {problem}: use 0" for problem in problems if coeff]
