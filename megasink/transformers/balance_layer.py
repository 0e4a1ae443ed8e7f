"""The head-balance loss at one attention module of a model of transformers.

Shapes: B rows, T tokens, H query heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megasink.attention import gate_sum
from megasink.balance.layer_loss import LayerBalance, attach_gradient
from megasink.balance.step import Factors, LossStep
from megasink.config import HeadBalanceOptions
from megasink.errors import UserError
from megasink.transformers.decoder_blocks import Reader


class OneRank:
    """The group of a process by itself, whether or not there is a process group."""

    def size(self) -> int:
        """1."""
        return 1

    def rank(self) -> int:
        """0."""
        return 0


class LossScale(Factors):
    """The factors of one microbatch, read in its backward pass from the gradient of its loss."""

    def scaled(self, gradient_H: Tensor, coeff: float, why_scaled: str = "") -> Tensor:
        """Scale a gradient [H] like the loss."""
        if self._of_host is None:
            raise UserError(
                "the model returned no loss, which the head-balance loss needs for its scale: call "
                "it with labels, without compute_loss_func or label smoothing"
            )
        return super().scaled(gradient_H, coeff, why_scaled)


@dataclass
class Microbatch:
    """The arguments of one forward pass of the model, and the layers `recorded` so far."""

    real_BT: Tensor | None = None  # masks padding out; None without padding
    real_tokens: int | None = None
    targets: Tensor | None = None  # a scalar; None if the loss is a mean over the microbatch
    items: Any = None  # their number in the whole step, if given
    recorded: set[int] = field(default_factory=set)


class Owner(Protocol):
    """The part of :class:`megasink.transformers.balance_loss.HeadBalanceLoss` that layers read."""

    heads: int
    options: HeadBalanceOptions
    step: LossStep
    microbatch: Microbatch | None
    counted: set[int]


class ModelLayer(LayerBalance):
    """The loss at one attention module of a model of transformers."""

    def __init__(self, owner: Owner, layer: int, device: torch.device):
        alone: Any = OneRank()
        super().__init__(owner.options, owner.step, layer, owner.heads, alone, device=device)
        self._owner = owner

    # Its counts are Python's, which a compiled graph would take for constants.
    @torch.compiler.disable
    def forward(self, output: Tensor, gate_BHT: Tensor, real_BT: Tensor | None = None) -> Tensor:
        """Count the gates of a microbatch and attach the gradient of the loss."""
        microbatch = self._owner.microbatch
        batch, heads, tokens = gate_BHT.shape
        if microbatch is None:
            raise UserError(
                "only a part of the model was called: call the model to which the head-balance "
                "loss is attached"
            )
        real_BT, count = microbatch.real_BT, microbatch.real_tokens
        if count is None:
            count = batch * tokens
        if heads != self._owner.heads or (real_BT is not None and real_BT.shape != (batch, tokens)):
            mask = "" if real_BT is None else f" with an attention mask {list(real_BT.shape)}"
            raise UserError(
                f"layer {self.layer} has gates [batch, heads, tokens] of shape "
                f"{list(gate_BHT.shape)}, which does not fit {self._owner.heads} heads{mask}"
            )
        if self.routed.device != gate_BHT.device:
            self.to(gate_BHT.device)
        gate_sum_H = gate_sum(gate_BHT, real_BT)
        if self.layer in microbatch.recorded:
            # Gradient checkpointing runs the layer again, with the same operations; the backward
            # pass is that of the first run.
            return attach_gradient(output, gate_sum_H, lambda: torch.zeros_like(gate_sum_H))
        microbatch.recorded.add(self.layer)
        self._owner.counted.add(self.layer)
        return self.attach(output, gate_sum_H, count)

    def targets(self) -> Tensor | None:
        """Return the number of targets by which Trainer weights this microbatch; None: equally."""
        microbatch = self._owner.microbatch
        return None if microbatch is None else microbatch.targets

    def importance_group(self) -> Any:
        """All ranks in the scope "data-parallel", each with different tokens."""
        replicas = self.options.head_balance_scope == "data-parallel"
        if replicas and torch.distributed.is_initialized():
            return torch.distributed.group.WORLD
        return self.tp_group


class Seam:
    """A module's attribute that is not a submodule, so no state dict or cast reaches it."""

    def __init__(self, layer: ModelLayer):
        self._layer = layer

    def __call__(self, out_BHTD: Tensor, gate_BHT: Tensor, real_BT: Tensor | None) -> Tensor:
        result: Tensor = self._layer(out_BHTD, gate_BHT, real_BT)
        return result


def explicit_hook(
    attention: torch.nn.Module, counter: ModelLayer, reader: Reader, heads: int
) -> Callable[..., Tensor | None]:
    """Return a forward hook of the module that computes the gate's logits."""

    def hook(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not (attention.training and torch.is_grad_enabled()):
            return None
        gate_BTHX = reader(output, heads)
        wide = torch.promote_types(gate_BTHX.dtype, torch.float32)
        gate_BHT = gate_BTHX.to(wide).mean(-1).transpose(1, 2)
        counted: Tensor = counter(output, gate_BHT)
        return counted

    return hook
