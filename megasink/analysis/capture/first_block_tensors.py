"""The tensors of the first blocks from which geometry.npz is made.

Shapes: B rows, T tokens, E hidden size, F intermediate size of the MLP, X one of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megasink.transformers.decoder_blocks import Block, child

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

    def add_norm(self, half: int, norm: torch.nn.Module | None, read: Any) -> None:
        """Add the norm between a state and the half block that reads it, if there is one."""
        if norm is not None:
            self.available.append(Site(str(half), norm, read))
            return
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


DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2")
_UP = ("up_proj", "w3", "c_fc", "dense_h_to_4h", "fc1")
_FUSED = "gate_up_proj"  # [gate; up]
_BEFORE = ("input_layernorm", "ln_1", "operator_norm", "attention_norm")


def transformers_sites(blocks: list[Block]) -> Sites:
    """Return the sites in the first blocks."""
    sites = Sites()
    _add_mlp(sites, blocks[0].mlp)
    for index, block in enumerate(blocks[:BLOCKS]):
        norms = {2 * index: child(block.module, _BEFORE)}
        if not block.parallel:  # there the MLP reads the block's input too
            norms[2 * index + 1] = None if block.middle is block.mlp else block.middle
        for half, norm in norms.items():
            sites.add_norm(half, norm, lambda _, out: tensor_of(out))
    return sites


def _add_mlp(sites: Sites, mlp: torch.nn.Module | None) -> None:
    down = None if mlp is None else child(mlp, DOWN)
    if mlp is None or down is None:
        reason = f"block 0 has no MLP with {' or '.join(DOWN)}: experts have no common activation"
        sites.missing[PRODUCT] = sites.missing[UP] = reason
        return
    sites.available.append(Site(PRODUCT, down, lambda product, _: product))
    up, fused = child(mlp, _UP), child(mlp, (_FUSED,))
    if up is not None:
        sites.available.append(Site(UP, up, lambda _, out: out))
    elif fused is not None:
        sites.available.append(Site(UP, fused, lambda _, out: out.chunk(2, -1)[1]))
    else:
        sites.missing[UP] = f"the MLP of block 0 has no {', '.join(_UP)} or {_FUSED}"
