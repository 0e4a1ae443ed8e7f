"""Vanilla attention as gated attention: key 0 is the slot; the kernel runs over the other keys.

s_i = scale * q_i . k_0 and u = v_0, so the gate 1 - A_i0 = sigmoid(LSE over keys 1.. - s_i) keeps
values of 1e-20 that 1 - exp(z_i0 - LSE_i) would round to 0 (P0.7, docs/maths.md). Rows that see
only key 0 (the first token, unless a prefix makes more keys visible) bypass the kernel: G = 0,
out = v_0.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, S keys, D head
dim.
"""

import torch
from torch import Tensor

from megasink.attention.backends import Backend
from megasink.attention.block_masks import backward_blocks, forward_blocks
from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.layout import (
    dot_with_each_row,
    empty_in_order_of,
    repeat_groups,
    statistics_dtype,
    weighted_row_sum,
)


def forward_first_key(
    kernel: Backend, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out_BHTD, lse_BHT over all visible keys, gate_BHT and weight_BHT = 1 - gate."""
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    alone = _rows_alone(queries, keys, call)
    first_value_BH1D = repeat_groups(value_BGSD[:, :, :1], query_BHTD.shape[1])
    first_key_BH1D = repeat_groups(key_BGSD[:, :, :1], query_BHTD.shape[1])
    dtype = statistics_dtype(query_BHTD.dtype)
    logit_BHT = dot_with_each_row(query_BHTD, first_key_BH1D).mul_(call.scale)
    if call.distance_bias_HS is not None:
        logit_BHT += call.distance_bias_HS[:, keys - queries : keys]
    if call.window is not None:
        logit_BHT[..., max(call.window - (keys - queries), 0) :] = -torch.inf
    out_BHTD = empty_in_order_of(query_BHTD)
    lse_BHT = logit_BHT.clone(memory_format=torch.contiguous_format)
    gate_BHT, weight_BHT = torch.zeros_like(lse_BHT), torch.ones_like(lse_BHT)
    out_BHTD[:, :, :alone] = first_value_BH1D
    if alone < queries:
        rows_BHTD, rows_lse_BHT = forward_blocks(
            kernel,
            query_BHTD[:, :, alone:],
            key_BGSD[:, :, 1:],
            value_BGSD[:, :, 1:],
            _without_first_key(call),
        )
        rows_logit_BHT = logit_BHT[..., alone:]
        torch.sigmoid(rows_lse_BHT - rows_logit_BHT, out=gate_BHT[..., alone:])
        torch.sigmoid(rows_logit_BHT - rows_lse_BHT, out=weight_BHT[..., alone:])
        torch.logaddexp(rows_lse_BHT, rows_logit_BHT, out=lse_BHT[..., alone:])
        # G O + (1 - G) u in one pass; written in place if no final cast is needed.
        mix = (rows_BHTD.to(dtype), first_value_BH1D.to(dtype), weight_BHT[..., alone:, None])
        if out_BHTD.dtype is dtype:
            torch.lerp(*mix, out=out_BHTD[:, :, alone:])
        else:
            out_BHTD[:, :, alone:] = torch.lerp(*mix)
    return out_BHTD, lse_BHT, gate_BHT, weight_BHT


def backward_first_key(
    kernel: Backend,
    tensors: BackwardTensors,
    grad_out_BHTD: Tensor,
    weight_BHT: Tensor,
    logit_grad_BHT: Tensor,
    call: AttentionCall,
) -> Gradients:
    """Compute the gradients of query, key, value and bias.

    Args:
        tensors: Inputs for the kernel, with the LSE gradient injected if the kernel takes none.
        grad_out_BHTD: The incoming gradient, without injection.
        weight_BHT: 1 - gate.
        logit_grad_BHT: Gradient of s.
    """
    query_BHTD, key_BGSD, value_BGSD = tensors.query_BHTD, tensors.key_BGSD, tensors.value_BGSD
    queries, keys, groups = query_BHTD.shape[2], key_BGSD.shape[2], key_BGSD.shape[1]
    alone = _rows_alone(queries, keys, call)
    first_key_BH1D = repeat_groups(key_BGSD[:, :, :1], query_BHTD.shape[1])
    scaled_grad_BHT1 = call.scale * logit_grad_BHT[..., None]
    grad_bias_HS = None
    if call.distance_bias_HS is not None:
        grad_bias_HS = torch.zeros_like(call.distance_bias_HS)
        grad_bias_HS[:, keys - queries :] = logit_grad_BHT.sum(0)
    rows_query_BHTD = rows_key_BGSD = rows_value_BGSD = rows_bias_HS = None
    if alone < queries:
        lse_grad_BHT = tensors.lse_grad_BHT
        rows = BackwardTensors(
            tensors.grad_out_BHTD[:, :, alone:],
            query_BHTD[:, :, alone:],
            key_BGSD[:, :, 1:],
            value_BGSD[:, :, 1:],
            tensors.out_BHTD[:, :, alone:],
            tensors.lse_BHT[..., alone:],
            None if lse_grad_BHT is None else lse_grad_BHT[..., alone:],
        )
        rows_query_BHTD, rows_key_BGSD, rows_value_BGSD, rows_bias_HS = backward_blocks(
            kernel, rows, _without_first_key(call)
        )
    # Free each of the kernel's gradients before allocating the next: this saves memory and lets a
    # CPU reuse the pages.
    grad_query_BHTD = empty_in_order_of(query_BHTD)
    grad_query_BHTD[:, :, :alone] = scaled_grad_BHT1[:, :, :alone] * first_key_BH1D
    if rows_query_BHTD is not None:
        torch.addcmul(
            rows_query_BHTD,
            scaled_grad_BHT1[:, :, alone:],
            first_key_BH1D,
            out=grad_query_BHTD[:, :, alone:],
        )
    del rows_query_BHTD
    first_grad_BGD = weighted_row_sum(scaled_grad_BHT1[..., 0], query_BHTD, groups)
    grad_key_BGSD = _behind_first(first_grad_BGD, rows_key_BGSD, key_BGSD)
    del rows_key_BGSD
    first_grad_BGD = weighted_row_sum(weight_BHT, grad_out_BHTD, groups)
    grad_value_BGSD = _behind_first(first_grad_BGD, rows_value_BGSD, value_BGSD)
    if grad_bias_HS is not None and rows_bias_HS is not None:
        grad_bias_HS[:, :-1] += rows_bias_HS
    return Gradients(grad_query_BHTD, grad_key_BGSD, grad_value_BGSD, grad_bias_HS)


def _behind_first(first_BGD: Tensor, rows_BGSD: Tensor | None, like_BGSD: Tensor) -> Tensor:
    """Join the first row and the other rows (None for 0), in the memory layout of `like`."""
    whole_BGSD = empty_in_order_of(like_BGSD)
    whole_BGSD[:, :, 0] = first_BGD
    whole_BGSD[:, :, 1:] = 0.0 if rows_BGSD is None else rows_BGSD
    return whole_BGSD


def _rows_alone(queries: int, keys: int, call: AttentionCall) -> int:
    """Return the number of leading rows that see only key 0."""
    if keys == 1:
        return queries
    return int(call.causal and queries == keys and call.prefix < 2)


def _without_first_key(call: AttentionCall) -> AttentionCall:
    """Return the call over the keys without key 0."""
    bias_HS = call.distance_bias_HS
    return call._replace(
        prefix=max(call.prefix - 1, 0),
        distance_bias_HS=None if bias_HS is None else bias_HS[:, :-1],
    )
