"""Attention with learnable key and value biases (P2.24 to P2.29), built on the sink slot.

A key bias is a sink whose logit depends on the query, so it needs no extra key column: the slot has
the logit scale * q_i . k*_h and the value v*_h.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megasink.attention.call import AttentionOutput
from megasink.attention.functional import attention, slot_attention
from megasink.attention.layout import (
    dot_with_each_row,
    statistics_dtype,
    weighted_row_sum,
    without_autocast,
)


def biased_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    key_bias_HD: Tensor | None = None,
    value_bias_HD: Tensor | None = None,
    scale: float | None = None,
    with_gate: bool = True,
    **options: Any,
) -> AttentionOutput:
    """Compute `reference_biased_attention` with gradients of output, LSE and gate.

    Args:
        query_BHTD, key_BGSD, value_BGSD: See `attention`.
        key_bias_HD: k*, one per query head; float32, or float64 for float64 queries. Not rotated;
            visible to every token regardless of the window. None for no key bias.
        value_bias_HD: v*, same dtype: the value of that key, or, without a key bias, added to the
            output.
        scale: Factor of the scores, including q . k*; None for D ** -0.5.
        with_gate: Return the gate if there is no key bias (with a key bias it is free).
        options: Options of `attention`: window, causal, backend.

    Raises:
        ValueError: A bias has the wrong shape or dtype; also see `attention`.
        ConfigError: See `attention`.
    """
    heads, head_dim = query_BHTD.shape[1], query_BHTD.shape[-1]
    dtype = statistics_dtype(query_BHTD.dtype)
    for name, bias in (("key_bias_HD", key_bias_HD), ("value_bias_HD", value_bias_HD)):
        if bias is not None and (bias.shape != (heads, head_dim) or bias.dtype is not dtype):
            raise ValueError(
                f"{name} must be [{heads}, {head_dim}] in {dtype}, got {list(bias.shape)} in "
                f"{bias.dtype}"
            )
    tensors = (query_BHTD, key_BGSD, value_BGSD)
    value_bias_1H1D = None if value_bias_HD is None else value_bias_HD[None, :, None]
    if key_bias_HD is not None:
        logit_BHT = bias_logit(query_BHTD, key_bias_HD, head_dim**-0.5 if scale is None else scale)
        return slot_attention(*tensors, logit_BHT, value_bias_1H1D, scale=scale, **options)
    out_BHTD, lse_BHT, gate_BHT = attention(*tensors, scale=scale, with_gate=with_gate, **options)
    if value_bias_1H1D is not None:
        out_BHTD = (out_BHTD + value_bias_1H1D).to(query_BHTD.dtype)
    return AttentionOutput(out_BHTD, lse_BHT, gate_BHT)


def bias_logit(query_BHTD: Tensor, key_bias_HD: Tensor, scale: float) -> Tensor:
    """Return scale * q_i . k*_h, [B, H, T] in the statistics dtype."""
    logit_BHT: Tensor = _BiasLogit.apply(query_BHTD, key_bias_HD, scale)
    return logit_BHT


class _BiasLogit(torch.autograd.Function):
    """Saves the query itself, not a copy in the statistics dtype."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_bias_HD: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query_BHTD, key_bias_HD)
        ctx.scale = scale
        with without_autocast():
            return dot_with_each_row(query_BHTD, key_bias_HD[None, :, None]).mul_(scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BHT: Tensor) -> tuple[Tensor, Tensor, None]:
        query_BHTD, key_bias_HD = ctx.saved_tensors
        grad_BHT = grad_BHT * ctx.scale
        grad_query_BHTD = grad_BHT[..., None] * key_bias_HD[:, None]
        with without_autocast():
            grad_bias_BHD = weighted_row_sum(grad_BHT, query_BHTD, groups=query_BHTD.shape[1])
        return grad_query_BHTD.to(query_BHTD.dtype), grad_bias_BHD.sum(0), None


def key_bias_logit(
    config: Any, parameters: Mapping[str, Tensor], query_BHTD: Tensor, scale: float
) -> Tensor:
    """Return scale * q_i . k*, [B, H, T]."""
    bias_HD = parameters["key_bias"].expand(query_BHTD.shape[1], query_BHTD.shape[-1])
    return bias_logit(query_BHTD, bias_HD, scale)


def fixed_value(
    config: Any, parameters: Mapping[str, Tensor], first_value: Callable[[], Tensor]
) -> Tensor | None:
    """Return v* of --bias-fixed-value (P2.28), [1, 1, 1, D]; None for 0."""
    kind, norm, like = config.bias_fixed_value, config.bias_fixed_value_norm, parameters["key_bias"]
    if kind == "none":
        return None
    head_dim = like.shape[-1]
    if kind == "uniform":
        return like.new_full((1, 1, 1, head_dim), norm * head_dim**-0.5)
    value_111D = like.new_zeros(1, 1, 1, head_dim)
    value_111D[..., 0] = norm
    return value_111D


def value_bias(config: Any, parameters: Mapping[str, Tensor], *_: Any) -> Tensor:
    """Return the value bias as [1, H, 1, D], or [1, 1, 1, D] if shared by all heads."""
    bias = parameters["value_bias"]
    return bias.view(1, -1, 1, bias.shape[-1])


def shifted_value(
    config: Any, parameters: Mapping[str, Tensor], first_value: Callable[[], Tensor]
) -> Tensor:
    """Return the value of the first key with the value bias, [B, H, 1 or T, D]."""
    return first_value() + value_bias(config, parameters)
