"""torch's RMSNorm and LayerNorm with support for sequence parallelism.

WrappedTorchNorm, Megatron's fallback without TransformerEngine and apex, rejects sequence
parallelism (megatron/core/transformer/torch_norm.py:52). Marking the weight is enough: its gradient
is a sum over the tokens of one rank, and finalize_model_grads all-reduces it.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


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
