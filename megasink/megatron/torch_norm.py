"""torch's RMSNorm and LayerNorm with support for sequence parallelism.

WrappedTorchNorm, Megatron's fallback without TransformerEngine and apex, rejects sequence
parallelism (megatron/core/transformer/torch_norm.py:52). Marking the weight is enough: its gradient
is a sum over the tokens of one rank, and finalize_model_grads all-reduces it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class TorchNorm:
    """Builds a torch norm from the transformer config, like Megatron's norm builders."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> torch.nn.Module:
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise ValueError(f"normalization {config.normalization!r}: use LayerNorm or RMSNorm")
        if config.layernorm_zero_centered_gamma:
            raise ValueError(
                "--apply-layernorm-1p needs TransformerEngine or apex: "
                "torch's norms have no zero-centered weight"
            )
        norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class GainlessRMSNorm(torch.nn.Module):
    """RMSNorm without a weight, x / sqrt(mean(x^2) + eps), as in nanochat; for any layout.

    It has no parameter, so nothing needs a sum over sequence-parallel ranks or a place in a
    checkpoint. Built from the transformer config, like Megatron's norms.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of x [..., hidden_size]; same dtype."""
        return F.rms_norm(x, (self.hidden_size,), eps=self.eps)
