"""Statistics computed from a kernel's log-sum-exp and gates.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megasink.attention.gate_kernels import TRITON, choose_gate_kernels
from megasink.attention.kernels import AttentionRequest
from megasink.attention.kernels.backend import compute_capability
from megasink.attention.layout import repeat_groups, row_dot


@torch.no_grad()
def first_key_gate(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float | None = None,
    prefix: int = 0,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    distance_bias_HS: Tensor | None = None,
) -> Tensor:
    """Compute the gate of vanilla causal attention, 1 - A_i0, from the LSE of its kernel.

    For statistics only: no gradient, and in float32 gates below about 1e-6 are rounded (`attention`
    with `with_gate` resolves 1e-20). Costs one pass over the queries.

    Args:
        query_BHTD, key_BGSD: Inputs of `attention`; the last query is aligned with the last key.
        lse_BHT: LSE returned by `attention`.
        scale, ..., distance_bias_HS: Options of that call.

    Returns:
        [B, H, T] in the LSE's dtype: 0 at the first position of each document (unless it sees a
        prefix), 1 where the window hides the first key.
    """
    tokens, keys, device = query_BHTD.shape[2], key_BGSD.shape[2], query_BHTD.device
    start_T = None
    if cu_seqlens is not None:
        from megasink.attention.documents import document_starts

        start_T = document_starts(cu_seqlens, device)[keys - tokens :]
    if distance_bias_HS is None and _in_triton(query_BHTD):
        from megasink.attention.gate_kernels import triton_shares

        factor = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
        return triton_shares.first_key_gate(
            *(query_BHTD, key_BGSD, lse_BHT, start_T, factor), alone=prefix < 2, window=window
        )
    position_T = torch.arange(keys - tokens, keys, device=device)
    first_key_BGTD = key_BGSD[:, :, :1]  # 1 for T
    if start_T is not None:
        position_T -= start_T
        first_key_BGTD = key_BGSD[:, :, start_T]
    logit_BHT = _logit(query_BHTD, first_key_BGTD, scale)
    if distance_bias_HS is not None:
        logit_BHT += distance_bias_HS[:, position_T]
    gate_BHT = torch.expm1(logit_BHT - lse_BHT).neg_().clamp_(min=0.0)
    if prefix < 2:
        gate_BHT.masked_fill_(position_T == 0, 0.0)
    if window is not None:
        gate_BHT.masked_fill_(position_T >= window, 1.0)
    return gate_BHT


def _in_triton(query_BHTD: Tensor) -> bool:
    """Return whether the gate of these queries is one Triton launch."""
    if query_BHTD.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    request = AttentionRequest(
        device_type=query_BHTD.device.type,
        dtype=query_BHTD.dtype,
        head_dim=query_BHTD.shape[-1],
        compute_capability=compute_capability(query_BHTD.device),
    )
    return choose_gate_kernels(request).name == TRITON


@torch.no_grad()
def first_key_share(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    lse_BHT: Tensor,
    tokens: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    distance_bias_HS: Tensor | None = None,
) -> Tensor:
    """Return alpha_1: the mean weight of the first `tokens` queries on key 0 (P2.1, k = 1).

    Attention sinks are counted from it (P2.2). The weight is A_i0 = exp(z_i0 - LSE_i). Causal rows
    do not see later tokens, so the first rows of a long sequence equal those of a short one. The
    first row, whose weight is 1 without a sink slot, is included: alpha_1 is then at least
    1 / tokens.

    Args:
        query_BHTD, key_BGSD: Inputs of `attention`, T = S, one document per sequence.
        lse_BHT: LSE returned by `attention`, including the sink slot if there is one.
        tokens: At most T.
        scale, window, distance_bias_HS: Options of that call.

    Returns:
        [B, H] in [0, 1], in the LSE's dtype.
    """
    query_BHTD, lse_BHT = query_BHTD[:, :, :tokens], lse_BHT[..., :tokens]
    logit_BHT = _logit(query_BHTD, key_BGSD[:, :, :1], scale)
    if distance_bias_HS is not None:
        logit_BHT += distance_bias_HS[:, :tokens]
    # Rounding may raise a weight above 1.
    weight_BHT = (logit_BHT - lse_BHT).exp_().clamp_(max=1.0)
    if window is not None:
        weight_BHT[..., window:] = 0.0
    return weight_BHT.mean(-1)


def _logit(query_BHTD: Tensor, key_BG1D: Tensor, scale: float | None) -> Tensor:
    """Return scale * q_i . k, [B, H, T], for one key or one key per token."""
    logit_BHT = row_dot(query_BHTD, repeat_groups(key_BG1D, query_BHTD.shape[1]))
    return logit_BHT.mul_(query_BHTD.shape[-1] ** -0.5 if scale is None else scale)
