"""Exact gradients of the log-sum-exp through kernels that have none (docs/maths.md).

Flash backwards use their `out` for one thing, delta_i = dO_i . O_i in dS_ij = P_ij (dO_i . v_j -
delta_i). A gradient g_i of LSE_i adds P_ij g_i to dS_ij: the same as delta_i - g_i for delta_i. So
the unmodified kernel returns the exact gradient when it is handed other rows for dO and O.

Shapes: B batch, H query heads, T tokens, D head dim.
"""

import torch
from torch import Tensor


def inject_lse_gradient(
    grad_out_BHTD: Tensor, out_BHTD: Tensor, lse_grad_BHT: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows dO' and O' with dO'_i . O'_i = dO_i . O_i - g_i.

    Ordinary rows keep dO, and O'_i = O_i - g_i dO_i / |dO_i|^2. Rows whose dO is 0 (tokens masked
    out of the loss, in the last layer) or below `smallest` times g get `smallest` g_i in the first
    channel of dO' and -1 / `smallest` in that of O': the rule scales with g, whose usual size is
    1e-8 to 1e-10. What such rows add to dv, `smallest` times g, is below every rounding error.

    Args:
        grad_out_BHTD: dO, bfloat16, float32 or float64 (float16 cannot hold the result).
        out_BHTD: O, of the same dtype.
        lse_grad_BHT: g, float32, or float64 for float64. Below 2**-100 it counts as 0 (2**-900 in
            float64), so that dO / g is finite.

    Returns:
        dO' and O', of the dtype of dO.
    """
    double = grad_out_BHTD.dtype is torch.float64
    smallest, negligible = (2.0**-200, 2.0**-900) if double else (2.0**-30, 2.0**-100)
    lse_grad_BHT1 = lse_grad_BHT.unsqueeze(-1)
    counts_BHT1 = lse_grad_BHT1.abs() > negligible
    # In units of g the norm needs no care; in those of dO, 1e-20, its square would underflow.
    ratio_BHTD = grad_out_BHTD * lse_grad_BHT1.where(counts_BHT1, 1.0).reciprocal_()
    norm_BHT1 = torch.linalg.vector_norm(ratio_BHTD, dim=-1, keepdim=True)
    tiny_BHT1 = (norm_BHT1 < smallest) & counts_BHT1
    step_BHT1 = norm_BHT1.square_().reciprocal_().where(counts_BHT1 & ~tiny_BHT1, 0.0)
    if ratio_BHTD.dtype is out_BHTD.dtype:
        injected_out_BHTD = ratio_BHTD  # not a fresh tensor: on a CPU its pages cost a pass
        torch.addcmul(out_BHTD, ratio_BHTD, step_BHT1, value=-1.0, out=injected_out_BHTD)
    else:
        injected_out_BHTD = ratio_BHTD.mul_(step_BHT1).neg_().add_(out_BHTD).to(out_BHTD.dtype)
    injected_grad_BHTD = grad_out_BHTD.clone()
    injected_out_BHTD[..., :1].masked_fill_(tiny_BHT1, -1.0 / smallest)
    first_BHT1 = injected_grad_BHTD[..., :1]
    first_BHT1.copy_(torch.where(tiny_BHT1, smallest * lse_grad_BHT1, first_BHT1))
    return injected_grad_BHTD, injected_out_BHTD
