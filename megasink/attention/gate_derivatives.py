"""Derivatives with respect to a bias on the gate logit, where the two losses can be compared.

The output of a head is Y = G O + (1 - G) u: u = 0 for an explicit gate or a sink, and the value of
the first key, which acts as the sink, for vanilla attention. For a bias b on the gate logit
log(G / (1 - G)), which is the score of a sigmoid gate and LSE - s_h of a sink,

    dY/db = (1 - G) (Y - u)        dG/db = G (1 - G)

so the gradient of any loss with respect to b needs no extra kernel call. For a sink, b is -s_h.

Shapes: B batch, H heads, T tokens, D head dim, C gates per head and token, 1 or D; 1 for a
dimension that broadcasts.
"""

import torch
from torch import Tensor

from megasink.attention.layout import statistics_dtype


@torch.no_grad()
def gate_bias_gradient(
    grad_out_BHTD: Tensor,
    out_BHTD: Tensor,
    gate_BHTC: Tensor,
    slot_value_BHTD: Tensor | None = None,
) -> Tensor:
    """Return dL/db of a loss with output gradient dL/dY.

    Args:
        out_BHTD: Y.
        gate_BHTC: G, in [0, 1].
        slot_value_BHTD: u, broadcastable; None for 0.

    Returns:
        [H], summed over tokens in float32 (float64 for float64).
    """
    moved_BHTD = out_BHTD.to(statistics_dtype(out_BHTD.dtype))
    if slot_value_BHTD is not None:
        moved_BHTD = moved_BHTD - slot_value_BHTD
    return ((1.0 - gate_BHTC) * moved_BHTD * grad_out_BHTD).sum((0, 2, 3))


@torch.no_grad()
def gate_slope(gate_BHTC: Tensor) -> Tensor:
    """Return dG/db, [B, H, T], where the gate of a token is its mean over C."""
    return (gate_BHTC * (1.0 - gate_BHTC)).mean(-1)
