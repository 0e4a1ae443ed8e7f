"""Exact gradients of the log-sum-exp through kernels that have none (docs/maths.md).

Flash backwards use their `out` for one thing, delta_i = dO_i . O_i in dS_ij = P_ij (dO_i . v_j -
delta_i). A gradient g_i of LSE_i adds P_ij g_i to dS_ij: the same as delta_i - g_i for delta_i. So
the unmodified kernel returns the exact gradient when it is handed other rows for dO and O.

Shapes: B batch, H query heads, T tokens, D head dim, C the leading channels that are changed.
"""

import torch
from torch import Tensor

from megasink.attention.layout import statistics_dtype


def inject_lse_gradient(
    grad_out_BHTD: Tensor, out_BHTD: Tensor, lse_grad_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows dO' and O' with dO'_i . O'_i = dO_i . O_i - g_i.

    One channel carries it: O'_i0 = O_i0 - g_i / dO_i0. Whatever the size of dO_i0, rounding O'_i0
    costs delta_i no more than a rounding of g_i. In bfloat16 that is too much, so channel 1 takes
    what the rounding of channel 0 lost.

    Where |dO_i0| < 2^-60 |g_i| (0 for tokens masked out of the loss) it is replaced by that floor,
    and O' stays below 2^60. The floor scales with g, whose usual size is 1e-8 to 1e-10, and what
    it adds to dv is below every rounding error.

    Args:
        grad_out_BHTD: dO, bfloat16, float32 or float64 (float16 cannot hold the result).
        out_BHTD: O, of the same dtype.
        lse_grad_BHT: g, float32, or float64 for float64.

    Returns:
        dO' and O', of the dtype of dO. dO' is dO itself where nothing was replaced (on a CPU; a
        GPU would have to wait for the answer).
    """
    dtype = statistics_dtype(grad_out_BHTD.dtype)
    smallest, least = (2.0**-400, 2.0**-900) if dtype is torch.float64 else (2.0**-60, 2.0**-120)
    channels = min(2 if grad_out_BHTD.dtype is torch.bfloat16 else 1, grad_out_BHTD.shape[-1])

    floor_BHT = (lse_grad_BHT.abs() * smallest).clamp_(min=least)
    absent_BHT = lse_grad_BHT == 0
    floor_BHT1 = floor_BHT.masked_fill_(absent_BHT, 0.0).unsqueeze(-1)
    leading_BHTC = grad_out_BHTD[..., :channels].to(dtype)
    tiny_BHTC = leading_BHTC.abs() < floor_BHT1
    if grad_out_BHTD.device.type != "cpu" or bool(tiny_BHTC.any()):
        grad_out_BHTD = grad_out_BHTD.clone()
        grad_out_BHTD[..., :channels] = floor_BHT1.where(tiny_BHTC, leading_BHTC)
        leading_BHTC = grad_out_BHTD[..., :channels].to(dtype)

    injected_out_BHTD, rest_BHT = out_BHTD.clone(), lse_grad_BHT
    for channel in range(channels):
        grad_BHT, old_BHT = leading_BHTC[..., channel], out_BHTD[..., channel]
        injected_BHT = injected_out_BHTD[..., channel]
        injected_BHT -= (rest_BHT / grad_BHT).masked_fill_(absent_BHT, 0.0)
        if channel + 1 < channels:
            rest_BHT = rest_BHT - grad_BHT * (old_BHT.to(dtype) - injected_BHT)
    return grad_out_BHTD, injected_out_BHTD
