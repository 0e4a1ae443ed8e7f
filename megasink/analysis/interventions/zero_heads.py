"""Static masks: chosen heads give zero to the output projection (P4.7, P3.12).

Shapes: B rows, Q tokens, H query heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.head_names import head_problems
from megasink.analysis.interventions.heads import Heads, heads_by_layer


class Zeroing(HeadChange):
    """See `ZeroHeads`."""

    def __init__(self, heads: Heads, mask_shape: Sequence[int] | None):
        self._heads, self._shape = heads, mask_shape
        self._layers = heads_by_layer(heads)
        self._masks: dict[int, Tensor] = {}

    def problems(self, heads: Sequence[int]) -> list[str]:
        problems = head_problems(self._heads, heads)
        shape = (len(heads), max(heads, default=0))
        if self._shape not in (None, shape):
            problems.append(
                f"the mask has {self._shape[0]} layers of {self._shape[1]} heads, the model "
                f"{shape[0]} of {shape[1]}"
            )
        return problems

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        heads = self._layers.get(outputs.layer)
        if heads is None:
            return None
        out_BQHD = outputs.out_BQHD
        mask_H1 = self._masks.get(outputs.layer)
        if mask_H1 is None or mask_H1.device != out_BQHD.device:
            mask_H1 = torch.zeros(out_BQHD.shape[2], 1, dtype=torch.bool)
            mask_H1[heads] = True
            mask_H1 = self._masks[outputs.layer] = mask_H1.to(out_BQHD.device)
        return out_BQHD.masked_fill(mask_H1, 0.0)
