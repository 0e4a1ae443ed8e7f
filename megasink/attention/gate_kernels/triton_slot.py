"""Triton kernels of a slot's gate: around a flash kernel's forward, and before its backward.

The formulas are those of `plain_gate_kernels.py`, derived in docs/maths.md. One program handles
ROWS tokens of one head. Tensors have any strides but a dense last dimension. Strides come in units
of ALIGN elements: the compiler then knows that rows are aligned and moves 16 bytes per instruction,
whatever the head dim, and no stride's value makes it compile again.

Shapes: B batch, H query heads, T tokens, D head dim, N programs per head, C leading channels that
carry the gradient of the LSE (injection.py).
"""

import triton
import triton.language as tl

from megasink.attention.gate_kernels.triton_launch import Kernel


@triton.jit
def _rounded(wide, dtype: tl.constexpr, ROUND_BY_HAND: tl.constexpr):
    """Round to nearest even. By hand for bfloat16 in Triton's interpreter, which truncates."""
    if ROUND_BY_HAND and dtype == tl.bfloat16:
        bits = wide.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        wide = tl.where(wide == wide, even.to(tl.float32, bitcast=True), wide)
    return wide.to(dtype)


@triton.jit
def _program(heads, batch, ROWS: tl.constexpr):
    """Return head, batch and first token. Heads come first: in Megatron's layout they adjoin."""
    program = tl.program_id(0)
    return program % heads, program // heads % batch, program // (heads * batch) * ROWS


@triton.jit
def _tile(heads, batch, tokens, documents, ROWS: tl.constexpr):
    """Return what a program works on: head, b, h and first row (int64), rows, and its first key.

    Rows are counted from the first one, r, and from token 0, t; some may be outside. `documents`
    has (first row, end, first key) for each program of a head, int32, so that its rows are of one
    document; None for key 0 of every row.
    """
    h, b, start = _program(heads, batch, ROWS)
    stop, first = tokens, 0
    if documents is not None:
        at = documents + start // ROWS * 3
        start, stop, first = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    r = tl.arange(0, ROWS)
    t = start + r
    return h, b.to(tl.int64), h.to(tl.int64), start.to(tl.int64), r, t, t < stop, first


@triton.jit
def _rows(x, x_b, x_h, x_t, b64, h64, start64, r, column, ALIGN: tl.constexpr):
    """Return pointers to the rows r from `start64` on."""
    at = x + (b64 * x_b + h64 * x_h + start64 * x_t) * ALIGN
    return at + (r[:, None] * x_t * ALIGN + column[None, :])


@triton.jit
def _values(u, u_b, u_h, u_t, b64, g64, start64, first, r, column, tile, documents, ALIGN):
    """Load u of each row: its own, or that of its document's first key."""
    if documents is not None:
        start64, r = first.to(tl.int64), r * 0
    at = _rows(u, u_b, u_h, u_t, b64, g64, start64, r, column, ALIGN)
    return tl.load(at, mask=tile, other=0.0).to(tl.float32)


@Kernel
def close_slot_kernel(
    rows_out,  # O, or None if every row sees the slot alone; may be the memory of out
    o_b,
    o_h,
    o_t,
    rows_lse,
    l_b,
    l_h,
    l_t,
    out,  # Y
    y_b,
    y_h,
    y_t,
    lse,  # LSE', G and p: dense [B, H, T]
    gate,
    weight,
    logit,  # s; None for the first key, whose logit is scale * q_i . k
    s_b,
    s_h,
    s_t,
    value,  # u, by group; None for 0
    u_b,
    u_h,
    u_t,
    query,  # q and k, by group, for the first key
    q_b,
    q_h,
    q_t,
    key,
    k_b,
    k_h,
    k_t,
    documents,  # see _tile; with them, rows_out has every row
    scale,
    visible,  # the first key is visible to rows before this one; of documents, before key + this
    first_row,  # rows before it, or key + it, see the slot alone; they are not in rows_out
    batch,
    heads,
    per_group,
    tokens,
    D: tl.constexpr,  # of values and outputs
    COLUMNS: tl.constexpr,
    KEY_D: tl.constexpr,  # of query and key
    KEY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """out = G O + p u, G = sigmoid(LSE - s), p = sigmoid(s - LSE), lse = logaddexp(LSE, s)."""
    h, b64, h64, start64, r, t, inside, first = _tile(heads, batch, tokens, documents, ROWS)
    g64 = (h // per_group).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    whole_columns = column < D
    tile = inside[:, None] & whole_columns[None, :]

    if logit is None:
        key_column = tl.arange(0, KEY_COLUMNS)
        within = key_column < KEY_D
        at = _rows(query, q_b, q_h, q_t, b64, h64, start64, r, key_column, ALIGN)
        q = tl.load(at, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float32)
        at = key + (b64 * k_b + g64 * k_h) * ALIGN + key_column
        if documents is not None:
            at += first.to(tl.int64) * k_t * ALIGN
        k = tl.load(at, mask=within, other=0.0).to(tl.float32)
        s = tl.sum(q * k[None, :], 1) * scale
        s = tl.where(t < visible + first, s, float("-inf"))
    else:
        at = logit + b64 * s_b + h64 * s_h + start64 * s_t + r * s_t
        s = tl.load(at, mask=inside, other=0.0)
    if rows_out is None:
        x = tl.full([ROWS], float("-inf"), tl.float32)
    else:
        among = inside & (t >= first_row + first)
        row64 = start64
        if documents is None:
            row64 -= first_row
        at = rows_lse + b64 * l_b + h64 * l_h + row64 * l_t + r * l_t
        x = tl.load(at, mask=among, other=float("-inf"))

    # 1 - G is never a difference: at s = -30 it would be lost.
    small = tl.exp(-tl.abs(x - s))
    large = tl.div_rn(1.0, 1.0 + small)
    small_share = tl.div_rn(small, 1.0 + small)
    keys_lead = x >= s
    g = tl.where(keys_lead, large, small_share)
    p = tl.where(keys_lead, small_share, large)
    at = (b64 * heads + h64) * tokens + start64 + r
    tl.store(lse + at, tl.maximum(x, s) + tl.log(1.0 + small), mask=inside)
    tl.store(gate + at, g, mask=inside)
    tl.store(weight + at, p, mask=inside)

    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    if rows_out is not None:
        at = _rows(rows_out, o_b, o_h, o_t, b64, h64, row64, r, column, ALIGN)
        o = tl.load(at, mask=among[:, None] & whole_columns[None, :], other=0.0)
        y = o.to(tl.float32) * g[:, None]
    if value is not None:
        u = _values(
            value, u_b, u_h, u_t, b64, g64, start64, first, r, column, tile, documents, ALIGN
        )
        y += p[:, None] * u
    at = _rows(out, y_b, y_h, y_t, b64, h64, start64, r, column, ALIGN)
    tl.store(at, _rounded(y, out.dtype.element_ty, ROUND_BY_HAND), mask=tile)


@Kernel
def open_slot_kernel(
    grad_out,  # dY; its leading channels become those of dO'
    d_b,
    d_h,
    d_t,
    out,  # Y; its leading channels become those of O'
    y_b,
    y_h,
    y_t,
    gate,  # dense [B, H, T], as weight; None if not needed
    weight,
    grad_gate,  # dG, or None
    g_b,
    g_h,
    g_t,
    grad_lse,  # e, or None
    e_b,
    e_h,
    e_t,
    value,  # u, by group; None for 0
    u_b,
    u_h,
    u_t,
    query,  # for key_grad
    q_b,
    q_h,
    q_t,
    documents,  # see _tile
    kept,  # [B, H, T, 2 C]: the leading channels of Y, and of dY where it changes, else NaN
    lse_grad,  # dense [B, H, T]: p dG + e, for a kernel that takes it
    logit_grad,  # dense [B, H, T]: ds
    logit_sum,  # [B, H, N]: ds summed over the program's rows
    value_sum,  # [B, H, N, D]: p dY summed
    key_sum,  # [B, H, N, D]: scale * ds q summed
    scale,
    batch,
    heads,
    per_group,
    tokens,
    D: tl.constexpr,  # of values and outputs
    COLUMNS: tl.constexpr,
    KEY_D: tl.constexpr,  # of query and key
    KEY_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OWN_SINK: tl.constexpr,  # logit_sum is -sum p dG alone, the rest the attention kernel's
    ALIGN: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """ds = p (dY . (u - Y) + e - G dG), and dO' . O' = dY . Y - (p dG + e)."""
    h, b64, h64, start64, r, _, inside, first = _tile(heads, batch, tokens, documents, ROWS)
    g64 = (h // per_group).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    whole_columns = column < D
    tile = inside[:, None] & whole_columns[None, :]
    dense = (b64 * heads + h64) * tokens + start64 + r
    programs = heads * batch
    block = (b64 * heads + h64) * (tl.num_programs(0) // programs) + tl.program_id(0) // programs
    d_rows = grad_out + (b64 * d_b + h64 * d_h + start64 * d_t) * ALIGN + r * d_t * ALIGN
    y_rows = out + (b64 * y_b + h64 * y_h + start64 * y_t) * ALIGN + r * y_t * ALIGN

    g = tl.zeros([ROWS], tl.float32)
    slot = tl.zeros([ROWS], tl.float32)  # e - G dG
    if weight is not None:
        p = tl.load(weight + dense, mask=inside, other=0.0)
    if grad_lse is not None:
        at = grad_lse + b64 * e_b + h64 * e_h + start64 * e_t + r * e_t
        g = tl.load(at, mask=inside, other=0.0)
        slot = g
    if grad_gate is not None:
        at = grad_gate + b64 * g_b + h64 * g_h + start64 * g_t + r * g_t
        dg = tl.load(at, mask=inside, other=0.0)
        g += dg * p
        slot -= tl.load(gate + dense, mask=inside, other=0.0) * dg
    if lse_grad is not None:
        tl.store(lse_grad + dense, g, mask=inside)

    if OWN_SINK:
        if logit_sum is not None:
            tl.store(logit_sum + block, -tl.sum(p * dg, 0))
    elif (logit_grad is not None) or (logit_sum is not None) or (value_sum is not None):
        d = tl.load(d_rows[:, None] + column[None, :], mask=tile, other=0.0).to(tl.float32)
        y = tl.load(y_rows[:, None] + column[None, :], mask=tile, other=0.0).to(tl.float32)
        if value is not None:
            y -= _values(
                value, u_b, u_h, u_t, b64, g64, start64, first, r, column, tile, documents, ALIGN
            )
        ds = (slot - tl.sum(d * y, 1)) * p
        if logit_grad is not None:
            tl.store(logit_grad + dense, ds, mask=inside)
        if logit_sum is not None:
            tl.store(logit_sum + block, tl.sum(ds, 0))
        if value_sum is not None:
            at = value_sum + block * D + column
            tl.store(at, tl.sum(p[:, None] * d, 0), mask=whole_columns)
        if key_sum is not None:
            key_column = tl.arange(0, KEY_COLUMNS)
            within = key_column < KEY_D
            at = _rows(query, q_b, q_h, q_t, b64, h64, start64, r, key_column, ALIGN)
            q = tl.load(at, mask=inside[:, None] & within[None, :], other=0.0).to(tl.float32)
            at = key_sum + block * KEY_D + key_column
            tl.store(at, tl.sum((ds * scale)[:, None] * q, 0), mask=within)

    if kept is not None:
        # As injection.py, operation for operation: the results are the same to the last bit.
        dtype: tl.constexpr = out.dtype.element_ty
        absent = g == 0.0
        floor = tl.where(absent, 0.0, tl.maximum(tl.abs(g) * 2.0**-60, 2.0**-120))
        # Every load of these rows comes before the first store to them, in all warps.
        d_0 = tl.load(d_rows, mask=inside, other=0.0)
        y_0 = tl.load(y_rows, mask=inside, other=0.0)
        d_1 = tl.load(d_rows + CHANNELS - 1, mask=inside, other=0.0)
        y_1 = tl.load(y_rows + CHANNELS - 1, mask=inside, other=0.0)
        tl.debug_barrier()
        rest = g
        for c in tl.static_range(CHANNELS):
            d_c = d_0 if c == 0 else d_1
            y_c = y_0 if c == 0 else y_1
            tiny = inside & (tl.abs(d_c.to(tl.float32)) < floor)
            to_d = tl.where(tiny, _rounded(floor, dtype, ROUND_BY_HAND), d_c)
            grad = to_d.to(tl.float32)
            old = y_c.to(tl.float32)
            moved = tl.where(absent, 0.0, tl.div_rn(rest, tl.where(absent, 1.0, grad)))
            to_y = _rounded(old - moved, dtype, ROUND_BY_HAND)
            rest = rest - grad * (old - to_y.to(tl.float32))
            nan = tl.full([ROWS], float("nan"), tl.float32).to(dtype)
            at = kept + dense * (2 * CHANNELS) + c
            tl.store(at, y_c, mask=inside)
            tl.store(at + CHANNELS, tl.where(tiny, d_c, nan), mask=inside)
            tl.store(d_rows + c, to_d, mask=tiny)
            tl.store(y_rows + c, to_y, mask=inside)


@Kernel
def restore_kernel(
    grad_out,
    d_b,
    d_h,
    d_t,
    out,
    y_b,
    y_h,
    y_t,
    kept,
    batch,
    heads,
    tokens,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Put the leading channels back that `open_slot_kernel` changed."""
    _, b64, h64, start64, r, _, inside, _ = _tile(heads, batch, tokens, None, ROWS)
    at = kept + ((b64 * heads + h64) * tokens + start64 + r) * (2 * CHANNELS)
    d_rows = grad_out + (b64 * d_b + h64 * d_h + start64 * d_t) * ALIGN + r * d_t * ALIGN
    y_rows = out + (b64 * y_b + h64 * y_h + start64 * y_t) * ALIGN + r * y_t * ALIGN
    for c in tl.static_range(CHANNELS):
        tl.store(y_rows + c, tl.load(at + c, mask=inside, other=0.0), mask=inside)
        d_c = tl.load(at + CHANNELS + c, mask=inside, other=0.0)
        wide = d_c.to(tl.float32)
        tl.store(d_rows + c, d_c, mask=inside & (wide == wide))
