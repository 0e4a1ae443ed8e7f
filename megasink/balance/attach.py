"""Adds the gradient of the head-balance loss to the backward pass of the language model's loss.

Shapes: H query heads of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HeadBalanceScale:
    """The factors on the balance gradient of one model: those of the microbatch and of the step.

    Attributes:
        share: of the coefficient, in [0, 1], that the running step uses.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._loss_scale: Tensor | None = None
        self._targets: Tensor | None = None

    def set_loss_scale(self, scale: Tensor) -> None:
        """Keep the factor that Megatron puts on every loss of the microbatch.

        Args:
            scale: one element, a tensor so that nothing waits for the device: the fp16 loss scale
                times the context-parallel size over the number of microbatches (the loss scale
                alone under ``calculate_per_token_loss``; the forward step then says how many
                targets there are).
        """
        self._loss_scale = scale

    def set_step(
        self, step: int, warmup_steps: int = 0, decay_steps: int = 0, total_steps: int = 0
    ) -> None:
        """Let the coefficient rise linearly over the first steps and fall over the last ones.

        Args:
            step: finished steps of the run.
            warmup_steps: the step from which on it is whole; 0 for the first.
            decay_steps: over how many steps it falls, to 1 / decay_steps in the last one; 0 for
                none.
            total_steps: of the run, where it falls.
        """
        rising = (step + 1) / warmup_steps if warmup_steps else 1.0
        falling = (total_steps - step) / decay_steps if decay_steps else 1.0
        self.share = max(0.0, min(1.0, rising, falling))

    def set_targets(self, targets: Tensor) -> None:
        """Say how many targets the microbatch has whose forward pass comes next.

        Args:
            targets: a scalar tensor: the sum of the loss mask over the tokens of the
                microbatch, those of all context-parallel ranks.
        """
        self._targets = targets

    def keep_targets(self, output: Tensor) -> Tensor:
        """Have the targets of the microbatch in its backward pass, where recompute asks for them.

        Args:
            output: what the stage returned; other microbatches may come before its backward pass.
        """
        targets = self._targets
        if targets is not None and output.requires_grad:
            output.register_hook(lambda _: self.set_targets(targets))
        return output

    @property
    def targets(self) -> Tensor:
        """The number of targets of the running microbatch, a scalar.

        Raises:
            RuntimeError: the forward step has not said it.
        """
        if self._targets is None:
            raise RuntimeError(
                "the head-balance loss under calculate_per_token_loss needs the number of targets: "
                "the forward step has to call config.statistics.balance.set_targets"
            )
        return self._targets.detach()

    def scaled(self, gradient_H: Tensor, coeff: float) -> Tensor:
        """A gradient at coefficient 1, [H], as the running microbatch's backward pass takes it.

        Call it in the backward pass: the loss scale of a microbatch is set after its forward pass.
        """
        scale: Tensor | float = 1.0  # outside of Megatron's schedules
        if self._loss_scale is not None:
            scale = self._loss_scale.detach().reshape(()).to(gradient_H.device)
        return gradient_H * (scale * self.share * coeff)


class _AttachGradient(torch.autograd.Function):
    """Identity on ``output``; sends ``gradient()`` back to ``importance``."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, importance_H: Tensor, gradient: Callable[[], Tensor]
    ) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, ctx.gradient(), None


def attach_gradient(output: Tensor, importance_H: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """Return ``output`` unchanged; its backward also runs that of a loss on the importance.

    The head-balance loss is not linear in the importance, so its gradient dL/dImp is computed
    where all heads and tokens of its scope are known, and enters here as a constant.

    Args:
        output: the attention output, any shape and dtype; it must require a gradient.
        importance_H: [H] differentiable mean gate of this rank's heads, float32.
        gradient: called in the backward pass, where collectives that started in the forward pass
            are awaited; gives dL/dImp, [H] float32, no gradient.

    Returns:
        a tensor equal to ``output``.
    """
    result: Tensor = _AttachGradient.apply(output, importance_H, gradient)
    return result
