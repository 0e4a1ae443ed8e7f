"""Free the fused QKV output before the backward pass by copying V."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megasink.megatron.core_attention import CoreAttention


def frees_projection(layer: "CoreAttention", query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether V, a view of the projection [q, k, v], is the only reason to keep it for backward.

    Rotated queries and keys are new tensors, and rotating saves none; a norm saves its input.
    """
    config = layer.config
    recomputes = config.recompute_granularity == "selective"
    if (
        not (torch.is_grad_enabled() and value.requires_grad)
        or (config.qk_layernorm or config.qk_l2_norm)
        or (recomputes and "core_attn" in (config.recompute_modules or ()))
        or layer.cp_group.size() > 1  # what is saved has been gathered
    ):
        return False
    projection, *others = (x.untyped_storage() for x in (value, query, key))
    alone = all(other._cdata != projection._cdata for other in others)
    return alone and projection.nbytes() > value.numel() * value.element_size()
