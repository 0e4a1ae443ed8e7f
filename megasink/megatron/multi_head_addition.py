"""Multi-head addition: attention heads are summed before a single output projection (P2.44).

Shapes: S sequence, B batch, H query heads of this tensor-parallel rank, D head dim, X hidden size.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.parameters import ShardedByHeads, new_parameter


class HeadSumProjection(ShardedByHeads, MegatronModule):
    """O = (sum_h O_h) W_O with one W_O for all heads; replaces attention's ``linear_proj``.

    The sum over the heads of all tensor-parallel ranks has width D: it is reduced before the
    projection, and every rank holds the whole W_O. `weight` is W_O transposed, [X, D]. Arguments
    are those of a row-parallel linear layer.
    """

    def __init__(
        self,
        query_projection_size: int,
        hidden_size: int,
        *,
        config: MegasinkTransformerConfig,
        init_method: Any,
        bias: bool,
        tp_group: ProcessGroup,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        shape = (hidden_size, config.kv_channels)
        self.weight = new_parameter(shape, 0.0, config, of_tokens=True)
        self.bias = new_parameter(shape[:1], 0.0, config, of_tokens=True) if bias else None
        if config.perform_initialization:
            init_method(self.weight)

    def forward(self, heads_SBN: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project the sum of this rank's concatenated heads, [S, B, H * D].

        Return [S, B, X] (this rank's part under sequence parallelism), and the bias [X], not added
        yet, or None.
        """
        sum_SBD = heads_SBN.unflatten(-1, (-1, self.weight.shape[1])).sum(-2)
        if self.sequence_parallel:
            sum_SBD = reduce_scatter_to_sequence_parallel_region(sum_SBD, group=self.tp_group)
        else:
            sum_SBD = reduce_from_tensor_model_parallel_region(sum_SBD, group=self.tp_group)
        return torch.nn.functional.linear(sum_SBD, self.weight), self.bias
