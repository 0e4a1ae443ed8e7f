"""Explicit gates and norms of attention outputs (P1), as fast paths of the reference.

Shapes: T tokens, in any number of leading dimensions; H heads, query heads or key/value groups;
D head dim; C scores per head and token, 1 or D.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megasink.attention.layout import statistics_dtype

Reduce = Callable[[Tensor], Tensor]


def gate_values(score: Tensor, activation: str) -> Tensor:
    """The gate of a score, elementwise (P1.1, P1.11 to P1.14).

    Args:
        activation: "sigmoid", "silu", "ns-sigmoid" (0.5 + 0.5 sigmoid) or "identity".

    Returns:
        float32 whatever the dtype of the score (float64 for float64), as Megatron's own output
        gate: in bf16 a sigmoid near 1 has two digits.

    Raises:
        ValueError: an unknown activation.
    """
    score = score.to(statistics_dtype(score.dtype))
    if activation == "sigmoid":
        return score.sigmoid()
    if activation == "ns-sigmoid":
        return 0.5 + 0.5 * score.sigmoid()
    if activation == "silu":
        return torch.nn.functional.silu(score)
    if activation == "identity":
        return score
    raise ValueError(f"unknown gate activation {activation!r}")


def mean_over_heads(gate_THC: Tensor, heads: int, reduce: Reduce | None = None) -> Tensor:
    """The gate that all heads of a layer share (P1.9).

    Args:
        gate_THC: of this rank's heads.
        heads: of the layer, over all ranks.
        reduce: sums over the ranks that hold the others, in forward and in backward; None for a
            rank that holds all.

    Returns:
        [..., 1, C].
    """
    total = gate_THC.sum(-2, keepdim=True)
    return (total if reduce is None else reduce(total)) / heads


def apply_gate(x_THD: Tensor, gate_THC: Tensor, operation: str) -> Tensor:
    """x * gate ("multiply") or x + gate ("add"), in the dtype of x.

    Raises:
        ValueError: an unknown operation.
    """
    if operation == "multiply":
        return (x_THD * gate_THC).to(x_THD.dtype)
    if operation == "add":
        return (x_THD + gate_THC).to(x_THD.dtype)
    raise ValueError(f"unknown gate operation {operation!r}")


def head_rms_norm(x_THD: Tensor, weight_HD: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head by itself, with a weight per head and element (P1.16).

    Returns:
        in the dtype of x, computed in float32 (float64 for float64).
    """
    wide = x_THD.to(statistics_dtype(x_THD.dtype))
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * weight_HD).to(x_THD.dtype)
