"""The explicit gate as one Triton launch forward and one backward.

It saves x and the score as they are, and the gate of an elementwise gate is only returned as its
mean over the elements, which is what head importance takes (P0.11): in float32 the whole gate would
be twice as large as x in bfloat16.

Shapes: B batch, H heads, T tokens, D head dim, C scores per head and token, 1 or D.
"""

from typing import Any

import torch
from torch import Tensor

from megasink.attention.gate_kernels.slot_launch import (
    OPTIONS,
    TILE_OF_THREE,
    alignment,
    interpreted,
    strides,
    tiles,
)
from megasink.attention.kernels.cuda import device_of
from megasink.attention.layout import dense_rows, empty_in_order_of


def gate_rows(
    x_BHTD: Tensor, score_BHTC: Tensor, activation: str, operation: str
) -> tuple[Tensor, Tensor]:
    """Gate a CUDA tensor: `apply_gate` of `gate_values`; both results are differentiable.

    Returns the gated tensor, in the dtype and memory order of x (bfloat16, float16 or float32, any
    strides), and the mean gate over C [B, H, T], float32.
    """
    out_BHTD, gate_BHT = _Gate.apply(x_BHTD, score_BHTC, activation, operation)
    return out_BHTD, gate_BHT


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BHTD: Tensor, score_BHTC: Tensor, activation: str, operation: str
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_BHTD, score_BHTC)
        ctx.kind = activation, operation
        x_BHTD, score_BHTC = dense_rows(x_BHTD), dense_rows(score_BHTC)
        out_BHTD = empty_in_order_of(x_BHTD)
        gate_BHT = x_BHTD.new_empty(x_BHTD.shape[:3], dtype=torch.float32)
        _launch(x_BHTD, score_BHTC, out_BHTD, gate_BHT, activation, operation)
        return out_BHTD, gate_BHT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out_BHTD: Tensor | None, grad_gate_BHT: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out_BHTD is None and grad_gate_BHT is None:
            return None, None, None, None
        x_BHTD, score_BHTC = map(dense_rows, ctx.saved_tensors)
        grads = empty_in_order_of(x_BHTD), empty_in_order_of(score_BHTC)
        if grad_out_BHTD is not None:
            grad_out_BHTD = dense_rows(grad_out_BHTD)
        _launch_backward(grad_out_BHTD, x_BHTD, score_BHTC, grad_gate_BHT, *grads, *ctx.kind)
        return *grads, None, None


def _launch(
    x_BHTD: Tensor,
    score_BHTC: Tensor,
    out_BHTD: Tensor,
    gate_BHT: Tensor,
    activation: str,
    operation: str,
) -> None:
    """Fill out and the mean gate."""
    from megasink.attention.gate_kernels.triton_explicit import apply_gate_kernel

    by_element = _by_element(x_BHTD, score_BHTC)
    align = alignment(x_BHTD, out_BHTD, score_BHTC if by_element else None)
    columns, block, grid = tiles(x_BHTD, TILE_OF_THREE)
    with device_of(x_BHTD):
        apply_gate_kernel[grid](
            x_BHTD,
            *strides(x_BHTD, align),
            score_BHTC,
            *strides(score_BHTC, align if by_element else 1),
            out_BHTD,
            *strides(out_BHTD, align),
            gate_BHT,
            *x_BHTD.shape[:3],
            D=x_BHTD.shape[-1],
            COLUMNS=columns,
            ROWS=block,
            ALIGN=align,
            ELEMENTWISE=by_element,
            ACTIVATION=activation,
            MULTIPLY=operation == "multiply",
            ROUND_BY_HAND=interpreted(),
            **OPTIONS,
        )


def _launch_backward(
    grad_out_BHTD: Tensor | None,
    x_BHTD: Tensor,
    score_BHTC: Tensor,
    grad_gate_BHT: Tensor | None,
    grad_x_BHTD: Tensor,
    grad_score_BHTC: Tensor,
    activation: str,
    operation: str,
) -> None:
    """Fill the gradients of x and score."""
    from megasink.attention.gate_kernels.triton_explicit import apply_gate_backward_kernel

    by_element = _by_element(x_BHTD, score_BHTC)
    scores = (score_BHTC, grad_score_BHTC) if by_element else ()
    align = alignment(grad_out_BHTD, x_BHTD, grad_x_BHTD, *scores)
    of_score = align if by_element else 1
    columns, block, grid = tiles(x_BHTD, TILE_OF_THREE)
    with device_of(x_BHTD):
        apply_gate_backward_kernel[grid](
            grad_out_BHTD,
            *strides(grad_out_BHTD, align),
            x_BHTD,
            *strides(x_BHTD, align),
            score_BHTC,
            *strides(score_BHTC, of_score),
            grad_gate_BHT,
            *strides(grad_gate_BHT),
            grad_x_BHTD,
            *strides(grad_x_BHTD, align),
            grad_score_BHTC,
            *strides(grad_score_BHTC, of_score),
            *x_BHTD.shape[:3],
            D=x_BHTD.shape[-1],
            COLUMNS=columns,
            ROWS=block,
            ALIGN=align,
            ELEMENTWISE=by_element,
            ACTIVATION=activation,
            MULTIPLY=operation == "multiply",
            ROUND_BY_HAND=interpreted(),
            **OPTIONS,
        )


def _by_element(x_BHTD: Tensor, score_BHTC: Tensor) -> bool:
    return score_BHTC.shape[-1] > 1 or x_BHTD.shape[-1] == 1
