"""Vanilla attention as gated attention: key 0 is the slot; the kernel runs over the other keys.

s_i = scale * q_i . k_0 and u = v_0, so the gate 1 - A_i0 = sigmoid(LSE over keys 1.. - s_i) keeps
values of 1e-20 that 1 - exp(z_i0 - LSE_i) would round to 0 (P0.7, docs/maths.md). Rows that see
only key 0 (the first token, unless a prefix makes more keys visible) bypass the kernel: G = 0,
out = v_0. Of packed documents they are rows of the kernel, which are not used: the LSE of a row is
-inf for the gate, and so large for the backward that every weight is 0.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, S keys, D head
dim.
"""

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.gate_kernels import BeforeBackward, FirstKey
from megasink.attention.kernels import Backend
from megasink.attention.layout import empty_in_order_of
from megasink.attention.masked import backward_masked

# exp(z - this) is 0 for every score. Finite, for kernels that compute differences of exponents.
_NO_WEIGHT = 1e30


def first_key(
    query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
) -> FirstKey:
    """Return key 0 as the slot of these queries."""
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    if call.cu_seqlens is not None:
        skipped = int(keys > queries)
        return FirstKey(query_BHTD, key_BGSD, value_BGSD, keys, 0, skipped, call.cu_seqlens)
    alone = int(call.causal and queries == keys and call.prefix < 2) if keys > 1 else queries
    return FirstKey(query_BHTD, key_BGSD[:, :, :1], value_BGSD[:, :, :1], keys, alone)


def without_first_key(call: AttentionCall, queries: int) -> AttentionCall:
    """Return the call over the keys without key 0."""
    if call.cu_seqlens is not None:
        from megasink.attention.documents import without_first_keys

        return call._replace(cu_seqlens=without_first_keys(call.cu_seqlens, queries))
    bias_HS = call.distance_bias_HS
    return call._replace(
        prefix=max(call.prefix - 1, 0),
        distance_bias_HS=None if bias_HS is None else bias_HS[:, :-1],
    )


def backward_first_key(
    kernel: Backend,
    before: BeforeBackward,
    tensors: BackwardTensors,
    first: FirstKey,
    call: AttentionCall,
) -> Gradients:
    """Compute the gradients of query, key, value and bias, after those of the slot."""
    query_BHTD, key_BGSD, value_BGSD = tensors.query_BHTD, tensors.key_BGSD, tensors.value_BGSD
    queries, keys, alone = query_BHTD.shape[2], key_BGSD.shape[2], first.alone
    skipped, lse_BHT = first.skipped, tensors.lse_BHT
    if first.documents is not None:
        from megasink.attention.documents import first_keys

        places = first_keys(first.documents, queries, lse_BHT.device)
        lse_BHT = lse_BHT.masked_fill(places.position_T == 0, _NO_WEIGHT)
    add_to_query, fill_first_rows = before.add_to_query, before.fill_first_rows
    assert add_to_query is not None
    assert fill_first_rows is not None
    grad_bias_HS = None
    if call.distance_bias_HS is not None:
        grad_bias_HS = torch.zeros_like(call.distance_bias_HS)
        assert before.logit_grad is not None
        grad_bias_HS[:, keys - queries :] = before.logit_grad.sum(0)
    grad_query_BHTD = grad_key_BGSD = grad_value_BGSD = into = None
    if kernel.writes_gradients:
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = map(
            empty_in_order_of, (query_BHTD, key_BGSD, value_BGSD)
        )
        rows_of_query = grad_query_BHTD[:, :, alone:]
        of_keys = (grad_key_BGSD[:, :, skipped:], grad_value_BGSD[:, :, skipped:])
        into = (rows_of_query, *of_keys)
    rows_query_BHTD = rows_key_BGSD = rows_value_BGSD = rows_bias_HS = None
    if alone < queries:
        lse_grad_BHT = tensors.lse_grad_BHT
        rows = BackwardTensors(
            tensors.grad_out_BHTD[:, :, alone:],
            query_BHTD[:, :, alone:],
            key_BGSD[:, :, skipped:],
            value_BGSD[:, :, skipped:],
            tensors.out_BHTD[:, :, alone:],
            lse_BHT[..., alone:],
            None if lse_grad_BHT is None else lse_grad_BHT[..., alone:],
            into,
        )
        rows_query_BHTD, rows_key_BGSD, rows_value_BGSD, rows_bias_HS, _ = backward_masked(
            kernel, rows, without_first_key(call, queries)
        )
    # Free each of the kernel's gradients before allocating the next: this saves memory and lets a
    # CPU reuse the pages.
    if grad_query_BHTD is None:
        grad_query_BHTD = empty_in_order_of(query_BHTD)
    add_to_query(rows_query_BHTD, grad_query_BHTD)
    del rows_query_BHTD
    grad_key_BGSD = _with_rows(grad_key_BGSD, rows_key_BGSD, key_BGSD, skipped)
    del rows_key_BGSD
    grad_value_BGSD = _with_rows(grad_value_BGSD, rows_value_BGSD, value_BGSD, skipped)
    fill_first_rows(grad_key_BGSD, grad_value_BGSD)
    if grad_bias_HS is not None and rows_bias_HS is not None:
        grad_bias_HS[:, :-1] += rows_bias_HS
    return Gradients(grad_query_BHTD, grad_key_BGSD, grad_value_BGSD, grad_bias_HS)


def _with_rows(
    whole_BGSD: Tensor | None, rows_BGSD: Tensor | None, like_BGSD: Tensor, skipped: int
) -> Tensor:
    """Return a tensor in the memory layout of `like`, with these last rows (None of one key)."""
    if whole_BGSD is None:
        whole_BGSD = empty_in_order_of(like_BGSD)
    into_BGSD = whole_BGSD[:, :, skipped:]
    # The kernel may have written them there.
    if rows_BGSD is not None and rows_BGSD.data_ptr() != into_BGSD.data_ptr():
        into_BGSD.copy_(rows_BGSD)
    return whole_BGSD
