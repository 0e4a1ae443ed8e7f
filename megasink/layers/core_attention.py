"""The core-attention module inside Megatron's SelfAttention.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
T = S tokens, D head dim. Megatron hands over [S, B, heads, D] and takes [S, B, H * D]; packed
documents come as [T, heads, D].
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megasink.attention import attention, first_key_gate
from megasink.config import visible_tokens
from megasink.layers.documents import documents_of
from megasink.layers.importance import HeadCounter
from megasink.layers.position_bias import build_position_bias
from megasink.layers.transformer_config import MegasinkTransformerConfig


class CoreAttention(MegatronModule):
    """Vanilla, sink or off-by-one attention whose gates feed the head-balance loss (P0).

    Args:
        config: with ``attention_variant``, ``softmax_offset_init``, ``attention_kernel`` and
            ``head_balance_coeff``.
        layer_number: 1-based index in the whole model.
        attn_mask_type: causal.
        attention_type: "self".
        softmax_scale: factor of the scores; None for head_dim ** -0.5.
        pg_collection: with the tensor-parallel group ``tp``.

    Attributes:
        softmax_offset: for the sink variant, the logits s_h of this rank's heads [H], float32
            also where the model runs in bf16; sharded by heads. Megatron's inference and
            converters know it under this name.
        relative_bias: gives the biases of ``attention_bias_type``; None for none.

    Raises:
        ValueError: cross attention, or a mask other than the causal one.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: MegasinkTransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"attention_type {attention_type!r}: megasink has self attention only")
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"attention mask {attn_mask_type}: megasink has the causal mask only")
        self.config: MegasinkTransformerConfig = config
        self.layer_number = layer_number
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = visible_tokens(config.window_size) if windowed else None

        self.head_counter = HeadCounter(config, layer_number, self.tp_group)
        self.relative_bias = build_position_bias(config, self.tp_group)
        self.softmax_offset = None
        if config.attention_variant == "sink":
            heads = config.num_attention_heads // self.tp_group.size()
            # Not torch.cuda.current_device(), as upstream's: CPU initialisation means the CPU.
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            offset = torch.full((heads,), config.softmax_offset_init, device=device)
            self.softmax_offset = torch.nn.Parameter(offset.float())
            # Without these the gradient norm counts the sinks of tensor-parallel rank 0 only.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoreAttention":
        """Move with the module but stay float32: Float16Module turns every parameter into bf16."""
        kept = None if self.softmax_offset is None else self.softmax_offset.data
        super()._apply(fn, recurse)
        if self.softmax_offset is not None and kept is not None:
            moved = self.softmax_offset.data
            self.softmax_offset.data = moved.float() if kept.is_meta else kept.to(moved.device)
        return self

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention over [S, B, H, D] queries and [S, B, G, D] keys and values.

        Args:
            attention_mask: must be None or Megatron's own causal mask: it is not read.
            packed_seq_params: boundaries of packed documents, in the format thd: queries, keys and
                values are then [T, heads, D].

        Returns:
            [S, B, H * D] in the dtype of the query; [T, 1, H * D] for packed documents.

        Raises:
            NotImplementedError: an attention bias, or packed sequences in another format.
        """
        if attention_bias is not None:
            raise NotImplementedError(
                "an attention bias is not supported by CoreAttention: --attention-bias-type has "
                "those that depend on the distance alone"
            )
        documents = documents_of(packed_seq_params, query.shape[0])
        if documents is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        # Recompute runs forward a first time without gradients: that run counts nothing.
        counts = self.training and torch.is_grad_enabled()
        balances = counts and self.config.head_balance_coeff > 0
        query_BHTD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask: dict[str, Any] = {"window": self.window, "prefix": self.config.prefix_lm_tokens}
        longest = key.shape[0]
        if documents is not None:
            mask["cu_seqlens"], longest = documents.cu_seqlens, documents.longest
        if self.relative_bias is not None:
            mask["distance_bias_HS"] = self.relative_bias(longest, query.device)
        out_BHTD, lse_BHT, gate_BHT = attention(
            query_BHTD,
            key_BGSD,
            value_BGSD,
            variant=self.config.attention_variant,
            sink_H=self.softmax_offset,
            **mask,
            scale=self.softmax_scale,
            backend=self.config.attention_kernel,
            with_gate=balances or self.config.attention_variant != "vanilla",
        )
        out = out_BHTD.permute(2, 0, 1, 3)
        out = out.reshape(*out.shape[:2], -1)
        if not counts:
            return out
        if gate_BHT is None:
            gate_BHT = first_key_gate(
                query_BHTD, key_BGSD, lse_BHT, scale=self.softmax_scale, **mask
            )
        counted: Tensor = self.head_counter(out, gate_BHT, documents)
        return counted

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """The sinks, sharded by heads on axis 0, and the table of biases, on axis 1."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0, "relative_bias.weight": 1},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
