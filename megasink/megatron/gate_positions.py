"""SelfAttention gated elsewhere than on the SDPA output (P1's G2 to G5), or with a norm of it.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
N either of these, D head dim, C scores per head and token, 1 or D, M hidden size. Under sequence
parallelism the input and output hold a part of S, and everything in between the whole.
"""

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import head_rms_norm
from megasink.attention.variants.gate_options import gates_explicitly
from megasink.megatron.gated_attention import GatedSelfAttention
from megasink.megatron.parameters import ShardedByHeads, new_parameter

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


class PositionedGateSelfAttention(GatedSelfAttention):
    """GatedSelfAttention for every ``gate_position`` and ``sdpa_output_norm``.

    `linear_gate` [M, M] of the layer output's gate (G5) is replicated on every tensor-parallel
    rank.
    """

    def __init__(
        self,
        config: "MegasinkTransformerConfig",
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **kwargs: Any,
    ):
        groups, ranks = config.num_query_groups, config.tensor_model_parallel_size
        position = config.gate_position if gates_explicitly(config) else None
        projected = position in ("query", "key", "value")
        if projected and groups < ranks:
            raise ValueError(
                f"the {position} gate needs a key/value group for each tensor-parallel rank: "
                f"{groups} groups on {ranks} ranks"
            )
        super().__init__(config, submodules, layer_number, **kwargs)
        if config.sdpa_output_norm != "none":
            self.output_norm = HeadNorm(config, self.tp_group)
        if self.position == "output" and config.gate_input == "hidden":
            self.linear_gate = _replicated_linear(config)
        if projected:
            # Megatron splits and normalizes query, key and value together, right after linear_qkv.
            self.linear_qkv.register_forward_hook(self._gate_projected)

    def _gate_projected(
        self, linear_qkv: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """Gate the queries, keys or values in the rows [q... | k | v] of each group."""
        mixed, bias = output
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        groups, head_dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed_SBGND = mixed.view(*mixed.shape[:2], groups, queries + 2, head_dim)
        parts = list(mixed_SBGND.split([queries, 1, 1], dim=3))
        chosen = ("query", "key", "value").index(self.position or "")
        scores = linear_qkv.take_scores() if self.has_rows else None
        assert self.gate is not None
        gated_SBND, gate_SBNC = self.gate(parts[chosen].flatten(2, 3), scores)
        self._observe(gate_SBNC)
        parts[chosen] = gated_SBND.view_as(parts[chosen])
        return torch.cat(parts, dim=3).view(mixed.shape), bias

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's forward; a gate of the layer output also covers the projection bias."""
        output, bias = super().forward(hidden_states, *args, **kwargs)
        if self.position != "output" or self.gate is None:
            return output, bias
        output = output if bias is None else output + bias
        scores = None if self.linear_gate is None else self.linear_gate(hidden_states)
        gated_SB1M, gate_SB1C = self.gate(output.unsqueeze(2), scores)
        self._observe(gate_SB1C)
        return gated_SB1M.squeeze(2), None


class HeadNorm(ShardedByHeads, MegatronModule):
    """RMSNorm (P1.16) or SiLU (P1.17) on the SDPA output of each head.

    RMSNorm's `weight` is [H * D], initialized to 1. The paper does not say whether heads share it;
    separate weights match GroupNorm and need no reduction over the ranks.
    """

    weight: torch.nn.Parameter | None

    def __init__(self, config: "MegasinkTransformerConfig", tp_group: ProcessGroup):
        super().__init__(config=config)
        self.config: MegasinkTransformerConfig = config
        self.tp_group = tp_group
        self.weight = None
        if config.sdpa_output_norm == "rmsnorm":
            heads = config.num_attention_heads // tp_group.size()
            self.weight = new_parameter((heads * config.kv_channels,), 1.0, config, axis=0)

    def forward(self, x_SBHD: Tensor) -> Tensor:
        """Normalize each head; the result has the dtype of the input."""
        if self.weight is None:
            return torch.nn.functional.silu(x_SBHD)
        weight_HD = self.weight.view(*x_SBHD.shape[-2:])
        return head_rms_norm(x_SBHD, weight_HD, self.config.layernorm_epsilon)


def _replicated_linear(config: "MegasinkTransformerConfig") -> torch.nn.Linear:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    linear = torch.nn.Linear(
        config.hidden_size,
        config.hidden_size,
        bias=config.add_bias_linear or config.add_qkv_bias,
        device=device,
        dtype=config.params_dtype,
    )
    for parameter in linear.parameters():
        # Each rank sees only its own tokens; finalize_model_grads then sums over the ranks.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear
