"""Explicit gates and norms of attention outputs (P1): fast versions of the reference.

Shapes: T any number of leading token dimensions; H query heads or key/value groups; D head dim;
C scores per head and token, 1 or D.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megasink.attention.layout import statistics_dtype

Reduce = Callable[[Tensor], Tensor]


def gate_values(score: Tensor, activation: str) -> Tensor:
    """Return the gate of a score (P1.1, P1.11 to P1.14), in float32 (float64 for float64).

    In bf16 a sigmoid near 1 would have two digits.
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
    raise ValueError(f"gate activation {activation!r}: use sigmoid, ns-sigmoid, silu or identity")


def mean_over_heads(gate_THC: Tensor, heads: int, reduce: Reduce | None = None) -> Tensor:
    """Return the gate [..., 1, C] shared by all `heads` of a layer (P1.9).

    `reduce` sums over the tensor-parallel ranks in both passes; None if this rank has all heads.
    """
    total = gate_THC.sum(-2, keepdim=True)
    return (total if reduce is None else reduce(total)) / heads


def apply_gate(x_THD: Tensor, gate_THC: Tensor, operation: str) -> Tensor:
    """Return x * gate ("multiply") or x + gate ("add"), in the dtype of x."""
    if operation not in ("multiply", "add"):
        raise ValueError(f"unknown gate operation {operation!r}: choose multiply or add")
    return (x_THD * gate_THC if operation == "multiply" else x_THD + gate_THC).to(x_THD.dtype)


def head_rms_norm(x_THD: Tensor, weight_HD: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of each head, weighted per head and element (P1.16), in the dtype of x."""
    wide = x_THD.to(statistics_dtype(x_THD.dtype))
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * weight_HD).to(x_THD.dtype)
