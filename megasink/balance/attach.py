"""Adds the gradient of the head-balance loss to the backward pass of the language-model loss.

Shapes: H query heads of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HeadBalanceScale:
    """The per-microbatch and per-step factors on the balance gradient of one model.

    Attributes:
        share: Fraction of the coefficient used in the current step, in [0, 1].
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._loss_scale: Tensor | None = None
        # The product of all factors, the same for every layer of a microbatch, and its coefficient.
        self._factor: tuple[float, Tensor | float] | None = None
        self._targets: Tensor | None = None

    def set_loss_scale(self, scale: Tensor | float) -> None:
        """Store the factor that Megatron applies to every loss of the microbatch.

        Args:
            scale: A number, or a tensor of one element to avoid a device sync: the fp16 loss scale
                times the context-parallel size divided by the number of microbatches (only the loss
                scale under ``calculate_per_token_loss``; the forward step then sets the number of
                targets).
        """
        self._loss_scale, self._factor = torch.as_tensor(scale), None

    def begin(self, share: float) -> None:
        """Set the share of the coefficient that counts in the step that begins, in [0, 1]."""
        self.share, self._factor = share, None

    def set_targets(self, targets: Tensor) -> None:
        """Set the number of targets of the microbatch that runs forward next.

        Args:
            targets: Scalar tensor: the sum of the loss mask over the tokens of the microbatch,
                on all context-parallel ranks.
        """
        self._targets = targets

    def keep_targets(self, output: Tensor) -> Tensor:
        """Restore the targets of this microbatch in its backward pass, where recompute needs them.

        Args:
            output: Output of the stage; other microbatches may run before its backward pass.
        """
        targets = self._targets
        if targets is not None and output.requires_grad:
            output.register_hook(lambda _: self.set_targets(targets))
        return output

    @property
    def targets(self) -> Tensor:
        """The number of targets of the current microbatch, a scalar."""
        if self._targets is None:
            raise RuntimeError(
                "the head-balance loss under calculate_per_token_loss needs the number of targets: "
                "the forward step has to call config.statistics.balance.set_targets"
            )
        return self._targets.detach()

    def scaled(self, gradient_H: Tensor, coeff: float, why_scaled: str = "") -> Tensor:
        """Scale a gradient [H] at coefficient 1 for the backward pass of the current microbatch.

        Call it in the backward pass: the loss scale of a microbatch is set after its forward pass.

        Args:
            why_scaled: Why a factor of 1 would be wrong; empty if it is right.
        """
        if self._loss_scale is None and why_scaled:
            raise RuntimeError(
                f"the head-balance loss has no loss scale, and {why_scaled}. Megatron's schedules "
                "set it through config.experimental_attention_variant_loss_scale_func "
                "(Megatron-Core 0.19 and later); another loop calls set_loss_scale(fp16 loss scale "
                "* context-parallel ranks / number of microbatches) of the HeadBalance before "
                "every backward pass"
            )
        if self._factor is None or self._factor[0] != coeff:
            scale: Tensor | float = 1.0  # one microbatch, outside of Megatron's schedules
            if self._loss_scale is not None:
                scale = self._loss_scale.detach().reshape(()).to(gradient_H.device)
            self._factor = coeff, scale * self.share * coeff
        return gradient_H * self._factor[1]


class _AttachGradient(torch.autograd.Function):
    """Identity on ``output``; sends ``gradient()`` back to the gates."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, gate_sum_H: Tensor, gradient: Callable[[], Tensor]
    ) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, ctx.gradient(), None


def attach_gradient(output: Tensor, gate_sum_H: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """Return ``output`` unchanged, with a backward that also propagates a loss on the importance.

    The head-balance loss is not linear in the importance, so its gradient dL/dImp is computed
    where all heads and tokens of its scope are known, and enters here as a constant.

    Args:
        output: Attention output, any shape and dtype; must require a gradient.
        gate_sum_H: [H] differentiable sum of the gates of this rank's heads, float32.
        gradient: Called in the backward pass, where it waits for collectives started in the
            forward pass; returns dL/dImp over the number of tokens in the sum, [H] float32, without
            gradient.

    Returns:
        A tensor equal to ``output``.
    """
    result: Tensor = _AttachGradient.apply(output, gate_sum_H, gradient)
    return result
