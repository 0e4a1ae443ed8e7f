"""Adds the gradient of the head-balance loss to the backward pass of the language model's loss.

Shapes: B batch, H query heads of this rank, T tokens, D head dim.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor


class HeadBalanceScale:
    """The factor that the trainer puts on every loss of a microbatch.

    Megatron calls ``set`` for every microbatch on every pipeline stage, through
    ``config.experimental_attention_variant_loss_scale_func``, with the fp16 loss scale over the
    number of microbatches (with the loss scale alone under ``calculate_per_token_loss``).
    """

    _scale: ClassVar[Tensor | None] = None

    @classmethod
    def set(cls, scale: Tensor) -> None:
        """Keep the scale: a tensor of one element, so that nothing waits for the device."""
        cls._scale = scale

    @classmethod
    def get(cls, like: Tensor) -> Tensor:
        """The scale of the running microbatch on the device of ``like``; 1 before the first."""
        if cls._scale is None:
            return torch.ones((), device=like.device)
        return cls._scale.detach().reshape(()).to(like.device)


class _AttachGradient(torch.autograd.Function):
    """Identity on ``output``; sends ``scale * coefficients`` back to ``importance``."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, importance_H: Tensor, coefficients_H: Tensor, weight: float
    ) -> Tensor:
        ctx.save_for_backward(coefficients_H)
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (coefficients_H,) = ctx.saved_tensors
        # Read here and not in forward: the scale of a microbatch is set after its forward pass.
        scale = HeadBalanceScale.get(coefficients_H) * ctx.weight
        return grad_output, coefficients_H * scale, None, None


def attach_gradient(
    output: Tensor, importance_H: Tensor, coefficients_H: Tensor, weight: float = 1.0
) -> Tensor:
    """Return ``output`` unchanged; its backward also runs that of sum_h c_h * Imp_h.

    The head-balance loss is not linear in the importance, so its gradient c = dL/dImp is computed
    where all heads and tokens of its scope are known, and enters here as a constant.

    Args:
        output: the attention output, any shape and dtype; it must require a gradient.
        importance_H: [H] differentiable mean gate of this rank's heads, float32.
        coefficients_H: [H] dL/dImp, float32, no gradient.
        weight: further factor: the tokens of the microbatch under ``calculate_per_token_loss``,
            where Megatron divides every gradient by the tokens of the global batch.

    Returns:
        a tensor equal to ``output``.
    """
    result: Tensor = _AttachGradient.apply(output, importance_H, coefficients_H, weight)
    return result
