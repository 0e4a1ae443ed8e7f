"""The head-balance loss written out, for oracles in which nothing of megasink.balance takes part.

Shapes: L layers, H query heads.
"""

import torch
from torch import Tensor


def balance_loss(importance_LH: Tensor, coeff: float, routed: list[list[int]]) -> Tensor:
    """coeff * sum over layers of n * CV^2 over its n routed heads (P0 Eq. 6-8)."""
    terms = []
    for importance_H, heads in zip(importance_LH, routed, strict=True):
        chosen = importance_H[heads]
        mean = chosen.sum() / len(heads)
        variance = ((chosen - mean) ** 2).sum() / len(heads)
        terms.append(len(heads) * variance / mean**2)
    return coeff * torch.stack(terms).sum()


def routed_heads(importance_LH: Tensor, shared: int) -> list[list[int]]:
    """Per layer the heads that are not among the `shared` most important ones."""
    routed = []
    for importance_H in importance_LH.tolist():
        order = sorted(range(len(importance_H)), key=lambda head: (-importance_H[head], head))
        routed.append(sorted(order[shared:]))
    return routed
