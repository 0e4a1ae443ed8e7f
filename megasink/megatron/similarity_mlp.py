"""Attention by another similarity than softmax (P2.30 to P2.38), and the MLP's parameters (P2.36).

Shapes: B batch, H query heads, G key/value groups, T = S tokens, D head dim.
"""

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import similarity_attention
from megasink.attention.constants import SINK_TOKENS

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


class _Weight(torch.nn.Linear):
    """Read its weight through a call, so that the pending gather of ``--overlap-param-gather`` ends
    first."""

    def forward(self, tp_group: ProcessGroup) -> Tensor:  # type: ignore[override]
        """Return the weight; its gradient is summed over the heads of every rank."""
        weight: Tensor = copy_to_tensor_model_parallel_region(self.weight, tp_group)
        return weight


class SimilarityMLP(torch.nn.Module):
    """The two [D, D] weights of mlp(x) = relu(x A^T) B^T, shared by queries, keys and all heads.

    Replicated on every tensor-parallel rank; initialized by megatron/initial_weights.py.
    """

    def __init__(self, config: "MegasinkTransformerConfig") -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        options: dict[str, Any] = {"bias": False, "dtype": config.params_dtype, "device": device}
        width = config.kv_channels
        self.fc1, self.fc2 = (_Weight(width, width, **options) for _ in range(2))

    def weights(self, tp_group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Return both weights; their gradients are summed over the heads of every rank."""
        return self.fc1(tp_group), self.fc2(tp_group)


def attend_by_similarity(
    core: Any,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    counts: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and 1 - the proxy weight of key 0 (P2.37), without gradient."""
    mlp, config = core.similarity_mlp, core.config
    out_BHTD, first_weight_BHT = similarity_attention(
        query_BHTD,
        key_BGSD,
        value_BGSD,
        similarity=config.attention_similarity,
        normalization=config.attention_normalization,
        mlp=None if mlp is None else mlp.weights(core.tp_group),
        window=core.window,
        scale=core.softmax_scale,
    )
    if not core.training and (observer := core.observer(attending=True)) is not None:
        observer.count_sinks(first_weight_BHT[..., :SINK_TOKENS].mean(-1))
    return out_BHTD, 1.0 - first_weight_BHT
