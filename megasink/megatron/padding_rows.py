"""Excludes vocabulary padding rows from every softmax.

Megatron pads the embedding to a multiple of 128 rows and includes the padding in its cross entropy.
Padding tokens occur in no text and no export: their logits are set so low that their probability
and gradient are exactly 0.

Shapes: S sequence, B batch, V rows of the vocabulary (of this tensor-parallel rank, or gathered).
"""

from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor


def mask_padding_rows(model: HybridModel, tokens: int | None) -> None:
    """Mask the padding in the logits of a model's output layer, in training and inference.

    The first `tokens` rows are tokens (None for all). Registers a hook only on stages with padding.
    Parameters and their names do not change.
    """
    if tokens is None or not model.post_process or tokens >= model.vocab_size:
        return
    local_rows = model.output_layer.output_size_per_partition
    first_row = local_rows * model.pg_collection.tp.rank()

    def masked(layer: Any, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits_SBV, bias = output
        gathered = logits_SBV.shape[-1] != local_rows
        kept = tokens if gathered else min(max(tokens - first_row, 0), local_rows)
        if kept < logits_SBV.shape[-1]:
            logits_SBV = _Masked.apply(logits_SBV, kept)
        return logits_SBV, bias

    model.output_layer.register_forward_hook(masked)


class _Masked(torch.autograd.Function):
    """Overwrites the logits from a given column on, in place.

    The gradient passes through unchanged: a softmax gradient is exactly 0 where the probability is,
    and a copy would be the largest tensor of a step.
    """

    @staticmethod
    def forward(ctx: Any, logits_SBV: Tensor, kept: int) -> Tensor:
        # Finite: TransformerEngine's cross entropy returns NaN if a rank has only -inf, and so does
        # the loss of a masked-out target. Halved, so that no difference overflows.
        logits_SBV[..., kept:] = torch.finfo(logits_SBV.dtype).min / 2
        ctx.mark_dirty(logits_SBV)
        return logits_SBV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
