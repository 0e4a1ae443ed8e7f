"""The number of shared heads of Eq. 8, chosen from the importance of a pre-trained model.

The paper never gives m (P0.15). Head pinning (P0.16) is that a few heads of each layer are high
before fine-tuning and Eq. 7 lifts all others up to them: the heads to share are the high group.

Shapes: L layers, H query heads, M candidates for m.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.balance.loss import routed_heads
from megasink.errors import UserError


@dataclass(frozen=True)
class SharedHeads:
    """The heads that fine-tuning with Eq. 8 should share.

    Attributes:
        m: Shared heads per layer; 0 for Eq. 7, if the heads do not fall into two groups.
        best: The m whose split explains most; 0 if there is no m to choose from.
        explained: Share of the Eq. 7 loss that lies between the two groups of `best`, in [0, 1].
        evenly: `explained` for evenly spaced heads, which have no groups: about 0.75.
        pinned_LH: [L, H] bool, the m most important heads of each layer.
        importance_LH: [L, H] float64, NaN for layers without softmax attention.
    """

    m: int
    best: int
    explained: float
    evenly: float
    pinned_LH: Tensor
    importance_LH: Tensor

    def describe(self) -> str:
        """Return the choice, its reason, and the shared heads of each layer, as lines of text."""
        layers = int((~self.importance_LH.isnan().all(1)).sum())
        heads = self.importance_LH.shape[1]
        if not self.best:
            why = "all heads of a layer are equally important"
            if heads < 3:
                of = f"{heads} head{'s' * (heads != 1)} per layer"
                why = f"with {of}, fewer than two heads would remain to balance if one were shared"
            return f"m = 0, no shared heads (Eq. 7): {why}"
        split = f"{self.best} high and {heads - self.best} low heads per layer explain"
        share = f"{self.explained:.0%} of the head imbalance of {layers} layers"
        if not self.m:
            return (
                f"m = 0, no shared heads (Eq. 7), because the heads do not form two groups: "
                f"{split} only {share}, and evenly spaced heads would explain {self.evenly:.0%}"
            )
        lines = [f"m = {self.m} shared heads (Eq. 8): {split} {share}"]
        rows = zip(self.pinned_LH, self.importance_LH, strict=True)
        for layer, (pinned_H, importance_H) in enumerate(rows):
            shared, routed = importance_H[pinned_H], importance_H[~pinned_H]
            if len(shared):
                named = " ".join(str(int(head)) for head in pinned_H.nonzero())
                lines.append(
                    f"layer {layer}: heads {named} (importance {_range(shared)}); the others "
                    f"{_range(routed)}"
                )
        return "\n".join(lines)


def choose_shared_heads(importance_LH: Tensor | NDArray[np.float64]) -> SharedHeads:
    """Choose m of Eq. 8 by two-means clustering of the importance within layers.

    Heads are measured relative to the mean of their layer, so that the variance of a layer is its
    CV^2, and the sum over layers the loss of Eq. 7. The best m, the same for all layers as in the
    paper, has the largest part of that loss between its top m heads and the two or more others.

    Any spread is explained to some degree: two halves of evenly spaced heads explain 75%, of
    normally distributed ones 64%. If the best split explains no more than it would for H evenly
    spaced heads, there are no two groups and nothing is pinned: m is 0, which is Eq. 7.

    Args:
        importance_LH: [L, H] mean gate of each head before fine-tuning, in [0, 1]; NaN in all of a
            layer without softmax attention.
    """
    importance_LH = torch.as_tensor(importance_LH).detach().double().cpu()
    if importance_LH.dim() != 2 or 0 in importance_LH.shape:
        raise UserError(f"head importance must be [layers, heads], got {[*importance_LH.shape]}")
    missing_LH = importance_LH.isnan()
    known_L = ~missing_LH.all(1)
    if not known_L.any():
        raise UserError("no layer has head importance: analyze a model with softmax attention")
    for layer in (missing_LH.any(1) & known_L).nonzero().flatten().tolist():
        raise UserError(f"layer {layer} lacks the importance of some of its heads")
    if not ((importance_LH >= 0) & (importance_LH <= 1) | missing_LH).all():
        raise UserError("head importance must be in [0, 1]: it is the mean of a gate")
    heads = importance_LH.shape[1]
    explained_M = _explained(importance_LH[known_L])
    best, explained, evenly = 0, 0.0, 0.0
    if len(explained_M) and not explained_M.isnan().any():
        # The first of equals, up to rounding: fewer shared heads.
        best = 1 + int((explained_M >= explained_M.max() - 1e-12).nonzero()[0])
        explained = float(explained_M[best - 1])
        evenly = float(_explained(torch.arange(1, heads + 1, dtype=torch.float64)[None]).max())
    m = best if explained > evenly + 1e-9 else 0
    pinned_LH = ~routed_heads(importance_LH.nan_to_num(), m) & known_L[:, None]
    return SharedHeads(m, best, explained, evenly, pinned_LH, importance_LH)


def _explained(importance_LH: Tensor) -> Tensor:
    """Return [M] for m = 1 .. H - 2; NaN if all heads of every layer are equal."""
    heads = importance_LH.shape[1]
    mean_L1 = importance_LH.mean(1, keepdim=True)
    # A layer whose heads are all closed has no imbalance.
    deviation_LH = (importance_LH / mean_L1 - 1.0).nan_to_num()
    top_LM = deviation_LH.sort(1, descending=True).values.cumsum(1)[:, : max(0, heads - 2)]
    m_M = torch.arange(1, top_LM.shape[1] + 1, dtype=torch.float64)
    # The deviations sum to 0, so the rest of the layer has the opposite sum.
    between_M = (top_LM.square() * (1 / m_M + 1 / (heads - m_M))).sum(0)
    total = float(deviation_LH.square().sum())
    # Rounding of the mean is not an imbalance.
    return between_M / (total if total > 1e-24 * importance_LH.numel() else math.nan)


def _range(values: Tensor) -> str:
    return f"{float(values.min()):.2f} to {float(values.max()):.2f}"
