"""Megatron's latent attention with megasink's core attention and gate.

Shapes: S sequence, B batch, H query heads of this tensor-parallel rank, D head dim of the values,
X = H * D, L width of the latent of keys and values with the rotary key, M hidden size.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from megasink.attention.variants.gate_options import counts_heads, gate_shape, gates_explicitly
from megasink.megatron.document_rotary import rotate_by_document
from megasink.megatron.gate_modules import ExplicitGate
from megasink.megatron.gated_attention import GatesHeads
from megasink.megatron.microbatch_documents import PackedRow

if TYPE_CHECKING:
    from megasink.megatron.latent_config import LatentTransformerConfig


class LatentSelfAttention(GatesHeads, MLASelfAttention):
    """MLASelfAttention whose output is gated by scores of the normed hidden state.

    The scores come from a column-parallel projection of their own, `linear_gate` [H * C, M]: the
    down-projections are the same on all ranks.
    """

    config: "LatentTransformerConfig"

    def __init__(
        self,
        config: "LatentTransformerConfig",
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        **kwargs: Any,
    ):
        super().__init__(config, submodules, layer_number, **kwargs)
        self.hidden_size_per_attention_head = config.v_head_dim  # of the output
        self.gate, self.linear_gate = None, None
        self._scores: Tensor | None = None
        self.position: str | None = None
        self.counts_heads = counts_heads(config) and self.core_attention.counted
        rotate_by_document(self)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            for parameter in self.q_layernorm.parameters():
                # Each rank has the whole gradient. By its name, Megatron would sum them, as of a
                # norm of each rank's heads (megatron/core/distributed/finalize_model_grads.py:452).
                parameter.average_gradients_across_tp_domain = True
        if config.sequence_parallel and not config.qk_layernorm:
            # Without a norm the latent is a view, which Megatron gathers as it is
            # (megatron/core/tensor_parallel/layers.py:571) and NCCL refuses.
            self.linear_kv_up_proj.register_forward_pre_hook(
                lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
            )
        if not gates_explicitly(config):
            return
        self.gate, self.position = ExplicitGate(config, self.tp_group), config.gate_position
        self.linear_proj.register_forward_pre_hook(self._gate_output)
        if config.gate_input == "hidden":
            heads, width = gate_shape(config)
            self.linear_gate = build_module(
                submodules.linear_q_proj,
                config.hidden_size,
                heads * width,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.tp_group,
            )

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self.linear_gate is not None:
            self._scores, _ = self.linear_gate(hidden_states)
        result: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
        return result

    def _gate_output(self, projection: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        out_SBX, scores = inputs[0], self._scores
        self._scores = None
        heads = self.num_attention_heads_per_partition
        return self._gate_heads(out_SBX.unflatten(2, (heads, -1)), scores), *inputs[1:]

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> Any:
        """Return the classes of projections and norms; without a latent of queries, only keys'.

        Upstream then has a norm before the queries' projection, in TransformerEngine alone.
        """
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        config = copy.copy(self.config)
        config.q_lora_rank = 1
        classes = QKNormConfigResolver(config, submodules).resolve()
        return classes | {"linear_q_proj": submodules.linear_q_proj}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Project down; the gradient of the rotary key is the sum over the heads of all ranks.

        Upstream's is that of a rank's own heads, unless the sequence is sharded and the projection
        replicated (megatron/core/transformer/multi_latent_attention.py:735).
        """
        compressed, latent_SBL = super()._qkv_down_projection(hidden_states)
        if self.tp_group.size() == 1:
            return compressed, latent_SBL
        rank, rotated = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        sharded = latent_SBL.shape[-1] != rank + rotated
        if sharded:
            latent_SBL = gather_from_tensor_model_parallel_region(latent_SBL, group=self.tp_group)
        if self.config.sequence_parallel:
            if sharded:
                latent_SBL = scatter_to_sequence_parallel_region(latent_SBL, group=self.tp_group)
            return compressed, latent_SBL  # upstream gathers the rotary keys, and sums
        latent, rotary_key = latent_SBL.split([rank, rotated], dim=-1)
        rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.tp_group)
        return compressed, torch.cat((latent, rotary_key), dim=-1)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return queries, keys and values; a `PackedRow` is one sequence of a batch of 1."""
        if isinstance(packed_seq_params, PackedRow):
            packed_seq_params = None  # for upstream, that of the format thd
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )

    def _run_core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Call core attention, which takes values narrower than keys in every format."""
        out: Tensor = self.core_attention(query, key, value, *args, **kwargs)
        return out
