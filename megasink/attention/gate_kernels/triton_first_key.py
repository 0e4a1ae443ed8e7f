"""Gradients of the first key as the slot, after the attention kernel's: two Triton launches.

Conventions: see triton_slot.py.
"""

import triton.language as tl
from torch import Tensor

from megasink.attention.gate_kernels import launch
from megasink.attention.gate_kernels.base import FirstKey
from megasink.attention.gate_kernels.triton_slot import _jit, _program, _rounded


@_jit
def first_query_kernel(
    rows,  # dq of the attention kernel, or None; may be the memory of grad_query from first_row on
    r_b,
    r_h,
    r_t,
    grad_query,
    q_b,
    q_h,
    q_t,
    logit_grad,  # ds, dense [B, H, T]
    key,  # k of the first key, by group
    k_b,
    k_h,
    scale,
    first_row,  # rows before it are not in rows
    batch,
    heads,
    per_group,
    tokens,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """dq = rows + scale ds k."""
    h, b, start = _program(heads, batch, ROWS)
    b64, h64, start64 = b.to(tl.int64), h.to(tl.int64), start.to(tl.int64)
    r = tl.arange(0, ROWS)
    t = start + r
    inside = t < tokens
    column = tl.arange(0, COLUMNS)
    tile = inside[:, None] & (column < D)[None, :]
    at = logit_grad + (b64 * heads + h64) * tokens + start64 + r
    ds = tl.load(at, mask=inside, other=0.0) * scale
    at = key + (b64 * k_b + (h // per_group).to(tl.int64) * k_h) * ALIGN + column
    k = tl.load(at, mask=column < D, other=0.0).to(tl.float32)
    dq = ds[:, None] * k[None, :]
    if rows is not None:
        at = rows + (b64 * r_b + h64 * r_h + (start64 - first_row) * r_t) * ALIGN
        at += r[:, None] * r_t * ALIGN + column[None, :]
        dq += tl.load(at, mask=tile & (t >= first_row)[:, None], other=0.0).to(tl.float32)
    at = grad_query + (b64 * q_b + h64 * q_h + start64 * q_t) * ALIGN
    at += r[:, None] * q_t * ALIGN + column[None, :]
    tl.store(at, _rounded(dq, grad_query.dtype.element_ty, ROUND_BY_HAND), mask=tile)


@_jit
def first_rows_kernel(
    key_sum,  # [B, G, rows of a group, D], dense, as value_sum
    value_sum,
    grad_key,  # row 0 is written
    k_b,
    k_h,
    grad_value,
    v_b,
    v_h,
    group_tokens,  # rows of a group: its heads' programs
    batch,
    heads,  # G
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """Sum the programs' partial sums of the first key and of its value, in a fixed order."""
    g, b, block = _program(heads, batch, 1)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    if block < blocks:
        at, into = key_sum, grad_key + b64 * k_b + g64 * k_h
    else:
        at, into = value_sum, grad_value + b64 * v_b + g64 * v_h
    column = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    at += (b64 * heads + g64) * group_tokens * D
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, group_tokens, ROWS):
        row = start + r
        tile = (row < group_tokens)[:, None] & (column < D)[None, :]
        total += tl.load(at + row[:, None] * D + column[None, :], mask=tile, other=0.0)
    row = _rounded(tl.sum(total, 0), grad_key.dtype.element_ty, ROUND_BY_HAND)
    tl.store(into + column, row, mask=column < D)


def add_to_query(
    rows: Tensor | None, grad_query: Tensor, logit_grad: Tensor, first: FirstKey, scale: float
) -> None:
    """See `BeforeBackward.add_to_query`."""
    batch, heads, tokens, head_dim = grad_query.shape
    rows = None if rows is None else launch.dense_rows(rows)
    align = launch.alignment(rows, grad_query, first.key_BG1D)
    columns, block, grid = launch.tiles(grad_query, launch.TILE)
    with launch.device_of(grad_query):
        first_query_kernel[grid](
            rows,
            *launch.strides(rows, align),
            grad_query,
            *launch.strides(grad_query, align),
            logit_grad,
            first.key_BG1D,
            *launch.strides(first.key_BG1D, align)[:2],
            scale,
            first.alone,
            batch,
            heads,
            heads // first.key_BG1D.shape[1],
            tokens,
            D=head_dim,
            COLUMNS=columns,
            ROWS=block,
            ALIGN=align,
            ROUND_BY_HAND=launch.interpreted(),
            **launch.OPTIONS,
        )


def fill_first_rows(
    key_sum: Tensor, value_sum: Tensor, grad_key: Tensor, grad_value: Tensor
) -> None:
    """See `BeforeBackward.fill_first_rows`."""
    batch, groups, _, head_dim = grad_key.shape
    heads, programs = key_sum.shape[1:3]
    columns = 16
    with launch.device_of(grad_key):
        first_rows_kernel[(batch * groups * 2 * -(-head_dim // columns),)](
            key_sum,
            value_sum,
            grad_key,
            *launch.strides(grad_key)[:2],
            grad_value,
            *launch.strides(grad_value)[:2],
            heads // groups * programs,
            batch,
            groups,
            D=head_dim,
            COLUMNS=columns,
            ROWS=128,
            ROUND_BY_HAND=launch.interpreted(),
            **launch.OPTIONS,
        )
