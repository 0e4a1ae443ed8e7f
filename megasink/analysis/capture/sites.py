"""The tensors of the first blocks from which geometry.npz is made.

Shapes: B rows, T tokens, E hidden size, F intermediate size of the MLP, X one of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BLOCKS = 2
"""Number of leading blocks whose normed states are kept; the circuit needs two."""

PRODUCT, UP = "mlp0", "mlp0_up"


@dataclass(frozen=True)
class Site:
    """A tensor of the forward pass that the probe reads."""

    name: str  # `PRODUCT`, `UP`, or for a norm the half of its state, such as "3"
    module: torch.nn.Module  # the module whose call produces or consumes the tensor
    # Maps the module's first input and output to the tensor, [B, T, X].
    read: Callable[[Tensor, Any], Tensor]


@dataclass
class Sites:
    """The sites of a model."""

    available: list[Site] = field(default_factory=list)  # the sites
    missing: dict[str, str] = field(default_factory=dict)  # name -> reason the site is absent
    # Number of tokens that the first positions may depend on, such as a bidirectional prefix; 0 if
    # attention is fully causal.
    context: int = 0

    def lacks_norm(self, half: int) -> None:
        """Record that no norm lies between a state and the half block that reads it."""
        reason = f"block {half // 2} has no norm before the module that reads this state"
        self.missing[f"normed state {half / 2:g}"] = reason


def tensor_of(output: Any) -> Tensor:
    """Return what a module returns, or the first entry of a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def fused_norm(linear: Any, state: Tensor) -> Tensor:
    """Apply the norm (RMSNorm or LayerNorm) inside a LayerNormLinear, in float32."""
    state, weight = state.float(), linear.layer_norm_weight.float()
    if linear.zero_centered_gamma:
        weight = 1 + weight
    if linear.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(state, weight.shape, weight, linear.eps)
    bias = None if linear.layer_norm_bias is None else linear.layer_norm_bias.float()
    return torch.nn.functional.layer_norm(state, weight.shape, weight, bias, linear.eps)
