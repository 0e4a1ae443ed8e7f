"""Exact log-sum-exp gradients through kernels that do not support them (docs/maths.md).

Flash backwards use `out` only for delta_i = dO_i . O_i in dS_ij = P_ij (dO_i . v_j - delta_i).
A gradient g_i of LSE_i adds P_ij g_i to dS_ij, which equals replacing delta_i by delta_i - g_i. So
the unmodified kernel returns the exact gradient when given modified rows of dO and O.

Shapes: B batch, H query heads, T tokens, D head dim, C the leading channels that are modified.
"""

import torch
from torch import Tensor

from megasink.attention.layout import statistics_dtype


def inject_lse_gradient(
    grad_out_BHTD: Tensor, out_BHTD: Tensor, lse_grad_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows dO' and O', in the dtype of dO, such that dO'_i . O'_i = dO_i . O_i - g_i.

    Channel 0 carries the change: O'_i0 = O_i0 - g_i / dO_i0. For any dO_i0, rounding O'_i0 changes
    delta_i by no more than rounding g_i. In bfloat16 that is too much, so channel 1 carries the
    rounding error of channel 0. float16 cannot hold the result.

    Where |dO_i0| < 2^-60 |g_i| (0 for tokens masked out of the loss) it is replaced by that floor,
    which keeps O' below 2^60. The floor scales with g, typically 1e-8 to 1e-10, and its effect on
    dv is below rounding error. On a CPU dO' is dO itself if nothing was replaced; on a GPU checking
    that would synchronize.
    """
    dtype = statistics_dtype(grad_out_BHTD.dtype)
    smallest, least = (2.0**-400, 2.0**-900) if dtype is torch.float64 else (2.0**-60, 2.0**-120)
    on_cpu = grad_out_BHTD.device.type == "cpu"
    if on_cpu:
        injected_out_BHTD = _injected(grad_out_BHTD, out_BHTD, lse_grad_BHT, largest=1 / smallest)
        if injected_out_BHTD is not None:
            return grad_out_BHTD, injected_out_BHTD
    leading_BHTC = grad_out_BHTD[..., : channels_of(grad_out_BHTD)].to(dtype)
    floor_BHT = (lse_grad_BHT.abs() * smallest).clamp_(min=least)
    absent_BHT = lse_grad_BHT == 0
    floor_BHT1 = floor_BHT.masked_fill_(absent_BHT, 0.0).unsqueeze(-1)
    tiny_BHTC = leading_BHTC.abs() < floor_BHT1
    if not on_cpu or bool(tiny_BHTC.any()):
        grad_out_BHTD = grad_out_BHTD.clone()
        grad_out_BHTD[..., : leading_BHTC.shape[-1]] = floor_BHT1.where(tiny_BHTC, leading_BHTC)
    injected_out_BHTD = _injected(grad_out_BHTD, out_BHTD, lse_grad_BHT, absent_BHT=absent_BHT)
    assert injected_out_BHTD is not None
    return grad_out_BHTD, injected_out_BHTD


def _injected(
    grad_out_BHTD: Tensor,
    out_BHTD: Tensor,
    lse_grad_BHT: Tensor,
    *,
    absent_BHT: Tensor | None = None,
    largest: float | None = None,
) -> Tensor | None:
    """Return O' for rows dO'; None if a quotient is above `largest` (then dO' needs its floor)."""
    channels, dtype = channels_of(grad_out_BHTD), lse_grad_BHT.dtype
    leading_BHTC = grad_out_BHTD[..., :channels].to(dtype)
    injected_out_BHTD, rest_BHT = out_BHTD.clone(), lse_grad_BHT
    for channel in range(channels):
        grad_BHT = leading_BHTC[..., channel]
        moved_BHT = rest_BHT / grad_BHT
        if absent_BHT is not None:
            moved_BHT.masked_fill_(absent_BHT, 0.0)
        elif largest is not None and not float(moved_BHT.abs().amax()) <= largest:  # NaN, too
            return None
        injected_BHT = injected_out_BHTD[..., channel]
        injected_BHT -= moved_BHT
        if channel + 1 < channels:
            old_BHT = out_BHTD[..., channel].to(dtype)
            rest_BHT = rest_BHT - grad_BHT * (old_BHT - injected_BHT)
    return injected_out_BHTD


def channels_of(rows_BHTD: Tensor) -> int:
    """Return the number of leading channels that carry the gradient, for rows of this dtype."""
    return min(2 if rows_BHTD.dtype is torch.bfloat16 else 1, rows_BHTD.shape[-1])
