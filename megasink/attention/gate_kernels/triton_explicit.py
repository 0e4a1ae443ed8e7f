"""Triton kernels of an explicit gate: out = x * f(score) or x + f(score), and its backward.

One program handles ROWS tokens of one head, as in triton_slot.py, whose conventions hold here too.

Shapes: B batch, H heads, T tokens, D head dim, C scores per head and token, 1 or D.
"""

import triton
import triton.language as tl

from megasink.attention.gate_kernels.triton_launch import Kernel
from megasink.attention.gate_kernels.triton_slot import _rounded, _rows, _tile


@triton.jit
def _activated(score, ACTIVATION: tl.constexpr):
    """Return f(score) and f'(score)."""
    small = tl.exp(-tl.abs(score))
    inverse = 1.0 / (1.0 + small)
    share = tl.where(score >= 0, 1.0, small) * inverse
    slope = small * inverse * inverse  # not share * (1 - share), which rounds to 0
    if ACTIVATION == "sigmoid":
        value = share
    elif ACTIVATION == "ns-sigmoid":
        value = 0.5 + 0.5 * share
        slope = 0.5 * slope
    elif ACTIVATION == "silu":
        value = score * share
        slope = share + score * slope
    else:
        tl.static_assert(ACTIVATION == "identity")
        value = score
        slope = tl.full(score.shape, 1.0, tl.float32)
    return value, slope


@Kernel
def apply_gate_kernel(
    x,
    x_b,
    x_h,
    x_t,
    score,
    s_b,
    s_h,
    s_t,
    out,
    y_b,
    y_h,
    y_t,
    gate,  # dense [B, H, T], the mean over C
    batch,
    heads,
    tokens,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """Gate x, and return the mean gate of each token."""
    _, b64, h64, start64, r, _, inside, _ = _tile(heads, batch, tokens, None, ROWS)
    column = tl.arange(0, COLUMNS)
    tile = inside[:, None] & (column < D)[None, :]
    at = _rows(x, x_b, x_h, x_t, b64, h64, start64, r, column, ALIGN)
    wide = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    dense = (b64 * heads + h64) * tokens + start64 + r
    if ELEMENTWISE:
        at = _rows(score, s_b, s_h, s_t, b64, h64, start64, r, column, ALIGN)
        g, _ = _activated(tl.load(at, mask=tile, other=0.0).to(tl.float32), ACTIVATION)
        mean = tl.sum(tl.where(tile, g, 0.0), 1) / D
    else:
        at = score + b64 * s_b + h64 * s_h + start64 * s_t + r * s_t
        mean, _ = _activated(tl.load(at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
        g = mean[:, None]
    tl.store(gate + dense, mean, mask=inside)
    wide = wide * g if MULTIPLY else wide + g
    at = _rows(out, y_b, y_h, y_t, b64, h64, start64, r, column, ALIGN)
    tl.store(at, _rounded(wide, out.dtype.element_ty, ROUND_BY_HAND), mask=tile)


@Kernel
def apply_gate_backward_kernel(
    grad_out,  # dY, or None for 0
    d_b,
    d_h,
    d_t,
    x,
    x_b,
    x_h,
    x_t,
    score,
    s_b,
    s_h,
    s_t,
    grad_gate,  # gradient of the mean gate, or None
    g_b,
    g_h,
    g_t,
    grad_x,
    y_b,
    y_h,
    y_t,
    grad_score,
    z_b,
    z_h,
    z_t,
    batch,
    heads,
    tokens,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    ELEMENTWISE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr,
):
    """dx = dY f (or dY), dscore = (dY x (or dY) + dG / C) f', summed over D for one score."""
    _, b64, h64, start64, r, _, inside, _ = _tile(heads, batch, tokens, None, ROWS)
    column = tl.arange(0, COLUMNS)
    tile = inside[:, None] & (column < D)[None, :]
    d = tl.zeros([ROWS, COLUMNS], tl.float32)
    if grad_out is not None:
        at = _rows(grad_out, d_b, d_h, d_t, b64, h64, start64, r, column, ALIGN)
        d = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    to_gate = d
    if MULTIPLY:
        at = _rows(x, x_b, x_h, x_t, b64, h64, start64, r, column, ALIGN)
        to_gate = d * tl.load(at, mask=tile, other=0.0).to(tl.float32)
    mean_grad = tl.zeros([ROWS], tl.float32)
    if grad_gate is not None:
        at = grad_gate + b64 * g_b + h64 * g_h + start64 * g_t + r * g_t
        mean_grad = tl.load(at, mask=inside, other=0.0)
    dtype: tl.constexpr = grad_score.dtype.element_ty
    if ELEMENTWISE:
        at = _rows(score, s_b, s_h, s_t, b64, h64, start64, r, column, ALIGN)
        g, slope = _activated(tl.load(at, mask=tile, other=0.0).to(tl.float32), ACTIVATION)
        dz = (to_gate + mean_grad[:, None] / D) * slope
        at = _rows(grad_score, z_b, z_h, z_t, b64, h64, start64, r, column, ALIGN)
        tl.store(at, _rounded(dz, dtype, ROUND_BY_HAND), mask=tile)
    else:
        at = score + b64 * s_b + h64 * s_h + start64 * s_t + r * s_t
        one, slope = _activated(tl.load(at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
        g = one[:, None]
        dz = (tl.sum(to_gate, 1) + mean_grad) * slope
        at = grad_score + b64 * z_b + h64 * z_h + start64 * z_t + r * z_t
        tl.store(at, _rounded(dz, dtype, ROUND_BY_HAND), mask=inside)
    if MULTIPLY:
        d = d * g
    at = _rows(grad_x, y_b, y_h, y_t, b64, h64, start64, r, column, ALIGN)
    tl.store(at, _rounded(d, grad_x.dtype.element_ty, ROUND_BY_HAND), mask=tile)
