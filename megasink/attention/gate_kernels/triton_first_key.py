"""Gradients of the first key as the slot, after the attention kernel's: two Triton launches.

Conventions: see triton_slot.py.
"""

import triton.language as tl
from torch import Tensor

from megasink.attention.gate_kernels import slot_launch
from megasink.attention.gate_kernels.protocol import FirstKey
from megasink.attention.gate_kernels.triton_launch import Kernel
from megasink.attention.gate_kernels.triton_slot import _program, _rounded, _rows, _tile


@Kernel
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
    k_t,
    documents,  # see _tile
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
    h, b64, h64, start64, r, t, inside, first = _tile(heads, batch, tokens, documents, ROWS)
    column = tl.arange(0, COLUMNS)
    tile = inside[:, None] & (column < D)[None, :]
    at = logit_grad + (b64 * heads + h64) * tokens + start64 + r
    ds = tl.load(at, mask=inside, other=0.0) * scale
    at = key + (b64 * k_b + (h // per_group).to(tl.int64) * k_h) * ALIGN + column
    if documents is not None:
        at += first.to(tl.int64) * k_t * ALIGN
    k = tl.load(at, mask=column < D, other=0.0).to(tl.float32)
    dq = ds[:, None] * k[None, :]
    if rows is not None:
        row64 = start64 - first_row
        at = _rows(rows, r_b, r_h, r_t, b64, h64, row64, r, column, ALIGN)
        dq += tl.load(at, mask=tile & (t >= first_row)[:, None], other=0.0).to(tl.float32)
    at = _rows(grad_query, q_b, q_h, q_t, b64, h64, start64, r, column, ALIGN)
    tl.store(at, _rounded(dq, grad_query.dtype.element_ty, ROUND_BY_HAND), mask=tile)


@Kernel
def first_rows_kernel(
    key_sum,  # [B, H, programs of a head, KEY_D], dense
    value_sum,  # the same with D
    grad_key,  # the row of each first key is written
    k_b,
    k_h,
    k_t,
    grad_value,
    v_b,
    v_h,
    v_t,
    documents,  # (first program, end, first key) of each, int32; None for all and key 0
    programs,  # of a head
    per_group,
    batch,
    heads,  # G
    D: tl.constexpr,
    KEY_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """Sum the programs' partial sums of first keys and of their values, in a fixed order."""
    g, b, block = _program(heads, batch, 1)
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    begin, stop, first64 = 0, programs, b64 * 0
    blocks: tl.constexpr = (KEY_D + COLUMNS - 1) // COLUMNS
    if documents is not None:
        both: tl.constexpr = blocks + (D + COLUMNS - 1) // COLUMNS
        entry = documents + block // both * 3
        begin, stop = tl.load(entry), tl.load(entry + 1)
        first64 = tl.load(entry + 2).to(tl.int64)
        block = block % both
    if block < blocks:
        sums, into = key_sum, grad_key + b64 * k_b + g64 * k_h + first64 * k_t
    else:
        sums, into = value_sum, grad_value + b64 * v_b + g64 * v_h + first64 * v_t
    width = tl.where(block < blocks, KEY_D, D)
    column = tl.where(block < blocks, block, block - blocks) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for h in range(0, per_group):
        at = sums + ((b64 * heads + g64) * per_group + h) * programs * width
        for start in range(begin, stop, ROWS):
            row = start + r
            tile = (row < stop)[:, None] & (column < width)[None, :]
            total += tl.load(at + row[:, None] * width + column[None, :], mask=tile, other=0.0)
    row = _rounded(tl.sum(total, 0), grad_key.dtype.element_ty, ROUND_BY_HAND)
    tl.store(into + column, row, mask=column < width)


def add_to_query(
    rows: Tensor | None, grad_query: Tensor, logit_grad: Tensor, first: FirstKey, scale: float
) -> None:
    """See `BeforeBackward.add_to_query`."""
    batch, heads, tokens, head_dim = grad_query.shape
    rows = None if rows is None else slot_launch.dense_rows(rows)
    align = slot_launch.alignment(rows, grad_query, first.key_BG1D)
    columns, block, grid = slot_launch.tiles(grad_query, slot_launch.TILE)
    documents, grid = slot_launch.of_documents(first, block, grid)
    with slot_launch.device_of(grad_query):
        first_query_kernel[grid](
            rows,
            *slot_launch.strides(rows, align),
            grad_query,
            *slot_launch.strides(grad_query, align),
            logit_grad,
            first.key_BG1D,
            *slot_launch.strides(first.key_BG1D, align),
            documents,
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
            ROUND_BY_HAND=slot_launch.interpreted(),
            **slot_launch.OPTIONS,
        )


def fill_first_rows(
    key_sum: Tensor, value_sum: Tensor, grad_key: Tensor, grad_value: Tensor, first: FirstKey
) -> None:
    """See `BeforeBackward.fill_first_rows`."""
    batch, groups, _, head_dim = grad_key.shape
    heads, programs = key_sum.shape[1:3]
    value_dim, columns = grad_value.shape[3], 16
    blocks, documents = -(-head_dim // columns) - (-value_dim // columns), None
    if first.documents is not None:
        _, rows, _ = slot_launch.tiles(first.query_BHTD, slot_launch.TILE_OF_THREE)
        documents = slot_launch.tables(first, rows).documents
        blocks *= len(documents)
    with slot_launch.device_of(grad_key):
        first_rows_kernel[(batch * groups * blocks,)](
            key_sum,
            value_sum,
            grad_key,
            *slot_launch.strides(grad_key),
            grad_value,
            *slot_launch.strides(grad_value),
            documents,
            programs,
            heads // groups,
            batch,
            groups,
            D=value_dim,
            KEY_D=head_dim,
            COLUMNS=columns,
            ROWS=128,
            ROUND_BY_HAND=slot_launch.interpreted(),
            **slot_launch.OPTIONS,
        )
