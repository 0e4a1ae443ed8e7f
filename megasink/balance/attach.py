"""Adds the gradient of the head-balance loss to the backward pass of the language model's loss.

Shapes: H query heads of this rank.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

Observe = Callable[[Tensor], None]


class HeadBalanceScale:
    """The factor that the trainer puts on every loss of a microbatch.

    Megatron calls ``set`` for every microbatch on every pipeline stage, through
    ``config.experimental_attention_variant_loss_scale_func``, with the fp16 loss scale times the
    context-parallel size over the number of microbatches (with the loss scale alone under
    ``calculate_per_token_loss``; the forward step then says how many targets there are).
    """

    _scale: ClassVar[Tensor | None] = None
    _share: ClassVar[float] = 1.0
    _targets: ClassVar[Tensor | None] = None

    @classmethod
    def set(cls, scale: Tensor) -> None:
        """Keep the scale: a tensor of one element, so that nothing waits for the device."""
        cls._scale = scale

    @classmethod
    def set_step(
        cls, step: int, warmup_steps: int = 0, decay_steps: int = 0, total_steps: int = 0
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
        cls._share = max(0.0, min(1.0, rising, falling))

    @classmethod
    def share(cls) -> float:
        """The share of the coefficient that the running step uses."""
        return cls._share

    @classmethod
    def set_targets(cls, targets: Tensor) -> None:
        """Say how many targets the microbatch has whose forward pass comes next.

        Args:
            targets: a scalar tensor: the sum of the loss mask over the tokens of the
                microbatch, those of all context-parallel ranks.
        """
        cls._targets = targets

    @classmethod
    def keep_targets(cls, output: Tensor) -> Tensor:
        """Have the targets of the microbatch in its backward pass, where recompute asks for them.

        Args:
            output: what the stage returned; other microbatches may come before its backward pass.
        """
        targets = cls._targets
        if targets is not None and output.requires_grad:
            output.register_hook(lambda _: cls.set_targets(targets))
        return output

    @classmethod
    def targets(cls) -> Tensor:
        """The number of targets of the running microbatch.

        Raises:
            RuntimeError: the forward step has not said it.
        """
        if cls._targets is None:
            raise RuntimeError(
                "the head-balance loss under calculate_per_token_loss needs the number of targets: "
                "the forward step has to call HeadBalanceScale.set_targets"
            )
        return cls._targets.detach()

    @classmethod
    def get(cls, like: Tensor) -> Tensor:
        """The scale of the running microbatch on the device of ``like``; 1 before the first."""
        if cls._scale is None:
            return torch.full((), cls._share, device=like.device)
        return cls._scale.detach().reshape(()).to(like.device) * cls._share


class _AttachGradient(torch.autograd.Function):
    """Identity on ``output``; sends ``scale * coefficients`` back to ``importance``."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        importance_H: Tensor,
        coefficients: Callable[[], Tensor],
        weight: float,
        observe: Observe | None,
    ) -> Tensor:
        ctx.coefficients = coefficients
        ctx.weight = weight
        ctx.observe = observe
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        coefficients_H = ctx.coefficients()
        # Read here and not in forward: the scale of a microbatch is set after its forward pass.
        scale = HeadBalanceScale.get(coefficients_H) * ctx.weight
        sent_H = coefficients_H * scale
        if ctx.observe is not None:
            ctx.observe(sent_H)
        return grad_output, sent_H, None, None, None


def attach_gradient(
    output: Tensor,
    importance_H: Tensor,
    coefficients: Callable[[], Tensor],
    weight: float = 1.0,
    observe: Observe | None = None,
) -> Tensor:
    """Return ``output`` unchanged; its backward also runs that of sum_h c_h * Imp_h.

    The head-balance loss is not linear in the importance, so its gradient c = dL/dImp is computed
    where all heads and tokens of its scope are known, and enters here as a constant.

    Args:
        output: the attention output, any shape and dtype; it must require a gradient.
        importance_H: [H] differentiable mean gate of this rank's heads, float32.
        coefficients: called in the backward pass, where collectives that started in the forward
            pass are awaited; gives dL/dImp, [H] float32, no gradient.
        weight: further factor: the coefficient of the loss.
        observe: called in the backward pass with the gradient that `importance_H` gets.

    Returns:
        a tensor equal to ``output``.
    """
    result: Tensor = _AttachGradient.apply(output, importance_H, coefficients, weight, observe)
    return result
