"""Sink^eps of a validation set: the share of heads that attend to the first key (P2.2, P2.27).

Shapes: B batch, L layers of the model, H query heads, h those of this tensor-parallel rank.
"""

import torch
from torch import Tensor

from megasink.attention.constants import SINK_EPSILON


class SinkRate:
    """Counts, per head, the sequences whose mean attention to one key exceeds `SINK_EPSILON`."""

    def __init__(self, layers: int, heads: int):
        self.layers, self.heads = layers, heads
        # [L, 2, 2, H]: first key and slot; number of sequences above the threshold, and total.
        self._table: Tensor | None = None

    def record(self, layer: int, first: int, first_BH: Tensor, slot_BH: Tensor | None) -> None:
        """Add one microbatch of one layer."""
        if self._table is None:
            self._table = self._zeros(first_BH.device)
        for index, share_BH in enumerate((first_BH, slot_BH)):
            if share_BH is not None:
                exceed_h, of_h = self._table[layer, index, :, first : first + share_BH.shape[1]]
                exceed_h += (share_BH > SINK_EPSILON).sum(0)
                of_h += len(share_BH)

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.layers, 2, 2, self.heads, dtype=torch.float64, device=device)

    def finish(self) -> tuple[Tensor, Tensor]:
        """All-reduce the counts; call it on every rank after the evaluation."""
        table = self._zeros(torch.device("cuda")) if self._table is None else self._table
        torch.distributed.all_reduce(table)
        rates = (table[:, :, 0] / table[:, :, 1]).float()
        return rates[:, 0], rates[:, 1]
