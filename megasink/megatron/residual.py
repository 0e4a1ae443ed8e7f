"""Addition of the attention or FFN output to the residual stream.

Shapes: S sequence, B batch, X hidden size.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import LayerNormBuilder
from torch import Tensor

from megasink.megatron.config import MegasinkTransformerConfig

OutputAndBias = tuple[Tensor, Tensor | None]


class ResidualAdd(MegatronModule):
    """Bias-dropout-add with a norm or clamp of the output, or a norm of the sum.

    It replaces the bias-dropout-add function of Megatron's layer, for attention and for the FFN
    (dense or MoE)::

        sandwich (P1.24):       H = H + dropout(norm(f(H) + b))
        residual clip (P1.25):  H = H + dropout(clamp(f(H) + b, -c, c))
        post-norm (P2.42):      H = norm(H + dropout(f(H) + b))

    The norm's weight must be marked for sequence parallelism.
    """

    def __init__(self, config: MegasinkTransformerConfig, norm: LayerNormBuilder):
        super().__init__(config=config)
        self.config: MegasinkTransformerConfig = config
        if config.sandwich_norm and (config.post_norm or config.residual_clip is not None):
            raise ValueError("sandwich_norm cannot be combined with post_norm or residual_clip")
        self.layernorm: Any = None
        if config.sandwich_norm or config.post_norm:
            self.layernorm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(
        self, training: bool, fused: bool
    ) -> Callable[[OutputAndBias, Tensor, float], Tensor]:
        """Return f((output [S, B, X], bias [X] or None), residual, dropout) -> new residual."""
        return functools.partial(self._add, get_bias_dropout_add(training, fused))

    def _add(
        self,
        add: Callable[[OutputAndBias, Tensor, float], Tensor],
        output_with_bias: OutputAndBias,
        residual_SBX: Tensor,
        dropout: float,
    ) -> Tensor:
        output_SBX, bias_X = output_with_bias
        if not self.config.post_norm or self.config.residual_clip is not None:
            # Norm and clamp apply to the output including its bias.
            output_SBX = output_SBX if bias_X is None else output_SBX + bias_X
            bias_X = None
        if self.config.residual_clip is not None:
            output_SBX = output_SBX.clamp(-self.config.residual_clip, self.config.residual_clip)
        if self.config.sandwich_norm:
            output_SBX = self.layernorm(output_SBX)
        residual_SBX = add((output_SBX, bias_X), residual_SBX, dropout)
        return self.layernorm(residual_SBX) if self.config.post_norm else residual_SBX
