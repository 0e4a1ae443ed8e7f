"""Rarely used modules of an attention layer, imported on demand."""

from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megasink.megatron.positions import DistanceBias
    from megasink.megatron.similarity import SimilarityMLP


def similarity_mlp(config: Any, head_dim: int, device: int | None) -> "SimilarityMLP | None":
    """Return the weights of the MLP similarity; None for another similarity."""
    if config.attention_similarity != "mlp":
        return None
    from megasink.megatron.similarity import SimilarityMLP

    return SimilarityMLP(head_dim, dtype=config.params_dtype, device=device)


def position_bias(config: Any, tp_group: ProcessGroup) -> "DistanceBias | None":
    """Return the bias of ``config.attention_bias_type`` for the heads of this rank, or None."""
    if config.attention_bias_type == "none":
        return None
    from megasink.megatron.positions import build_position_bias

    return build_position_bias(config, tp_group)
