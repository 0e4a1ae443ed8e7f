"""Rows that pad the vocabulary take no part in any softmax.

Megatron pads the embedding to a multiple of 128 rows and counts the padding as tokens in its cross
entropy. No text holds them and no export does: here their logits are so low that they have a
probability, and a gradient, of exactly 0.

Shapes: S sequence, B batch, V rows of the vocabulary (of this tensor-parallel rank, or gathered).
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


def mask_padding_rows(model: GPTModel, tokens: int | None) -> None:
    """Mask the padding in what a model's output layer returns, in training and inference.

    Nothing is registered on stages and ranks without such rows. Parameters and their names stay.

    Args:
        model: a pipeline stage.
        tokens: rows that count, the first of the vocabulary; None for all.
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
    """Overwrites the logits from a column on, in place.

    The gradient passes as it is: that of a softmax is exactly 0 where the probability is, and a
    copy of it would be the largest tensor of a step.
    """

    @staticmethod
    def forward(ctx: Any, logits_SBV: Tensor, kept: int) -> Tensor:
        # Finite: TransformerEngine's cross entropy gives NaN where a rank has -inf alone, and so
        # does the loss of a target that is masked out. Half of it, so that no difference overflows.
        logits_SBV[..., kept:] = torch.finfo(logits_SBV.dtype).min / 2
        ctx.mark_dirty(logits_SBV)
        return logits_SBV

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
