"""Gate and weight of a slot whose logit is part of the LSE, in one Triton launch.

A kernel with a sink of its own returns such an LSE (the slot is the sink), as does plain attention
(the slot is the first key). Conventions: see triton_slot.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from megasink.attention.gate_kernels import slot_launch
from megasink.attention.gate_kernels.triton_launch import Kernel
from megasink.attention.gate_kernels.triton_slot import _rows, _tile


@triton.jit
def _one_minus_exp(d):
    """1 - exp(d) for d <= 0, in full relative precision: by its series where exp(d) is near 1."""
    series = 1.0 + d * (1.0 / 9.0)
    for n in tl.static_range(8, 1, -1):
        series = 1.0 + d * series * (1.0 / n)
    return tl.where(d > -0.5, -d * series, 1.0 - tl.exp(d))


@Kernel
def share_kernel(
    lse,  # LSE'
    l_b,
    l_h,
    l_t,
    gate,  # G, and p or None: dense [B, H, T]
    weight,
    logit,  # s; None for the first key
    s_b,
    s_h,
    s_t,
    query,
    q_b,
    q_h,
    q_t,
    key,  # by group
    k_b,
    k_h,
    k_t,
    starts,  # first key of each query's document, [T] int64; None for key 0
    scale,
    first_row,  # position of the first query
    visible,  # a first key is visible to positions before this one
    batch,
    heads,
    per_group,
    tokens,
    ALONE: tl.constexpr,  # whether the query at the first key sees no other key
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """G = -expm1(s - LSE'), p = exp(s - LSE')."""
    h, b64, h64, start64, r, t, inside, _ = _tile(heads, batch, tokens, None, ROWS)
    at = lse + b64 * l_b + h64 * l_h + start64 * l_t + r * l_t
    x = tl.load(at, mask=inside, other=0.0)
    if logit is not None:
        at = logit + b64 * s_b + h64 * s_h + start64 * s_t + r * s_t
        s = tl.load(at, mask=inside, other=0.0)
    else:
        g64 = (h // per_group).to(tl.int64)
        column = tl.arange(0, COLUMNS)
        tile = inside[:, None] & (column < D)[None, :]
        position = first_row + t
        first = tl.zeros([ROWS], tl.int64)
        if starts is not None:
            first = tl.load(starts + t, mask=inside, other=0)
            position = position - first
        at = _rows(query, q_b, q_h, q_t, b64, h64, start64, r, column, ALIGN)
        q = tl.load(at, mask=tile, other=0.0).to(tl.float32)
        at = key + (b64 * k_b + g64 * k_h) * ALIGN
        at += first[:, None] * k_t * ALIGN + column[None, :]
        k = tl.load(at, mask=tile, other=0.0).to(tl.float32)
        s = tl.sum(q * k, 1) * scale
    d = tl.minimum(s - x, 0.0)  # rounding may raise it above
    g = _one_minus_exp(d)
    if logit is None:
        if ALONE:
            g = tl.where(position == 0, 0.0, g)
        g = tl.where(position < visible, g, 1.0)
    at = (b64 * heads + h64) * tokens + start64 + r
    tl.store(gate + at, g, mask=inside)
    if weight is not None:
        tl.store(weight + at, tl.exp(d), mask=inside)


def sink_shares(lse_BHT: Tensor, slot_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and weight of a sink; see `GateKernels.shares`."""
    gate_BHT, weight_BHT = (lse_BHT.new_empty(lse_BHT.shape) for _ in range(2))
    _launch(lse_BHT, gate_BHT, weight_BHT, logit=slot_logit)
    return gate_BHT, weight_BHT


def first_key_gate(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    lse_BHT: Tensor,
    starts_T: Tensor | None,
    scale: float,
    *,
    alone: bool,
    window: int | None,
) -> Tensor:
    """See `lse_statistics.first_key_gate`."""
    gate_BHT, keys = lse_BHT.new_empty(lse_BHT.shape), key_BGSD.shape[2]
    query_BHTD, key_BGSD = slot_launch.dense_rows(query_BHTD), slot_launch.dense_rows(key_BGSD)
    _launch(
        *(lse_BHT, gate_BHT, None),
        query=query_BHTD,
        key=key_BGSD,
        starts=starts_T,
        scale=scale,
        first_row=keys - query_BHTD.shape[2],
        visible=keys if window is None else window,
        alone=alone,
    )
    return gate_BHT


def _launch(
    lse: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    logit: Tensor | None = None,
    query: Tensor | None = None,
    key: Tensor | None = None,
    starts: Tensor | None = None,
    scale: float = 1.0,
    first_row: int = 0,
    visible: int = 0,
    alone: bool = False,
) -> None:
    batch, heads, tokens = lse.shape
    align, columns, rows, per_group = 1, 1, 1024, 1
    if query is not None and key is not None:
        align, per_group = slot_launch.alignment(query, key), heads // key.shape[1]
        columns, rows, _ = slot_launch.tiles(query, slot_launch.TILE_OF_THREE)
    with slot_launch.device_of(lse):
        share_kernel[(batch * heads * -(-tokens // rows),)](
            lse,
            *slot_launch.strides(lse),
            gate,
            weight,
            logit,
            *slot_launch.strides(logit),
            query,
            *slot_launch.strides(query, align),
            key,
            *slot_launch.strides(key, align),
            starts,
            scale,
            first_row,
            visible,
            batch,
            heads,
            per_group,
            tokens,
            ALONE=alone,
            D=1 if query is None else query.shape[3],
            COLUMNS=columns,
            ROWS=rows,
            ALIGN=align,
            **slot_launch.OPTIONS,
        )
