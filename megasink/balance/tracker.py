"""Collects the importance of every head over the microbatches of a step.

Shapes: L layers of the model, H query heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.loss import head_imbalance, squared_cv
from megasink.balance.reduce import sum_over_ranks


@dataclass(frozen=True)
class HeadStatistics:
    """One step's statistics, over the global batch.

    Attributes:
        importance_LH: mean gate of each head over all tokens (P0.10), float32, NaN for a layer
            that recorded nothing.
        imbalance_L: CV of each layer (P0.13).
        imbalance: mean over layers of CV (Eq. 6).
        balance_loss: the loss as it entered the gradient: the mean over microbatches of Eq. 7.
    """

    importance_LH: Tensor
    imbalance_L: Tensor
    imbalance: float
    balance_loss: float


class HeadTracker:
    """Sums per layer, on the device, until the step ends. One per process."""

    _rows: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def record(cls, layer: int, importance_H: Tensor, tokens: int, loss: Tensor | None) -> None:
        """Add one microbatch of one layer.

        Args:
            layer: 0-based index in the whole model.
            importance_H: mean gate of all heads of the layer.
            tokens: how many tokens it is the mean of.
            loss: the layer's term of the balance loss in this microbatch; None for none.
        """
        heads = importance_H.shape[0]
        row = cls._rows.get(layer)
        if row is None:
            # float64: sums over thousands of microbatches must not lose digits.
            row = cls._rows[layer] = importance_H.new_zeros(heads + 3, dtype=torch.float64)
        row[:heads] += importance_H.detach() * tokens
        if loss is not None:
            row[heads] += loss.detach()
        row[heads + 1] += tokens
        row[heads + 2] += 1

    @classmethod
    def finish_step(
        cls, layers: int, heads: int, dp_cp_group: ProcessGroup, pp_group: ProcessGroup
    ) -> HeadStatistics:
        """Reduce over ranks and stages with one tensor, and start over. Call it on every rank."""
        device = next(iter(cls._rows.values())).device if cls._rows else torch.device("cuda")
        table = torch.zeros(layers, heads + 3, dtype=torch.float64, device=device)
        for layer, row in cls._rows.items():
            table[layer] = row
        cls._rows.clear()
        sum_over_ranks(table, dp_cp_group, pp_group)
        importance_LH = (table[:, :heads] / table[:, heads + 1 : heads + 2]).float()
        loss = (table[:, heads] / table[:, heads + 2].clamp_min(1)).sum()
        imbalance_L = squared_cv(importance_LH).sqrt()
        return HeadStatistics(
            importance_LH, imbalance_L, float(head_imbalance(importance_LH)), float(loss)
        )
