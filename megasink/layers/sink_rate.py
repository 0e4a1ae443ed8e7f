"""Sink^eps of a validation set: how many heads attend to the first key (P2.2, P2.27).

Shapes: B batch, L layers of the model, H query heads, h those of this tensor-parallel rank.
"""

from typing import ClassVar

import torch
from torch import Tensor

from megasink.definitions import SINK_EPSILON
from megasink.definitions import SINK_TOKENS as TOKENS  # noqa: F401  # core attention takes it here


class SinkRate:
    """Counts, per head, the sequences whose mean attention to one key exceeds `SINK_EPSILON`.

    Attributes:
        collects: an evaluation that is counted is running.
    """

    collects: ClassVar[bool] = False
    # (first head, [2, 2, h]: first key and slot; how many exceed, of how many).
    _layers: ClassVar[dict[int, tuple[int, Tensor]]] = {}

    @classmethod
    def record(cls, layer: int, first: int, first_BH: Tensor, slot_BH: Tensor | None) -> None:
        """Add one microbatch of one layer.

        Args:
            layer: 0-based index in the whole model.
            first: index in the layer of the first of these heads.
            first_BH: alpha_1 of each sequence, [B, h] (`attention.first_key_share`).
            slot_BH: alpha_*, the mean attention to the sink beside the keys; None for none.
        """
        counts = torch.zeros(2, 2, first_BH.shape[1], dtype=torch.float64, device=first_BH.device)
        for index, share_BH in enumerate((first_BH, slot_BH)):
            if share_BH is not None:
                counts[index, 0] = (share_BH > SINK_EPSILON).sum(0)
                counts[index, 1] = len(share_BH)
        if layer in cls._layers:
            counts += cls._layers[layer][1]
        cls._layers[layer] = first, counts

    @classmethod
    def finish(cls, layers: int, heads: int) -> tuple[Tensor, Tensor]:
        """One all-reduce on every rank, when the evaluation has ended.

        Returns:
            [L, H] share of the sequences, in [0, 1], whose attention to the first key, and to the
            slot, exceeds `SINK_EPSILON`; NaN where nothing was recorded. float32.
        """
        device = next((c.device for _, c in cls._layers.values()), torch.device("cuda"))
        table = torch.zeros(layers, 2, 2, heads, dtype=torch.float64, device=device)
        for layer, (first, counts) in cls._layers.items():
            table[layer, :, :, first : first + counts.shape[-1]] = counts
        cls._layers.clear()
        cls.collects = False
        torch.distributed.all_reduce(table)
        rates = (table[:, :, 0] / table[:, :, 1]).float()
        return rates[:, 0], rates[:, 1]
