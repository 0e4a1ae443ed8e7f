"""The core-attention module inside Megatron's SelfAttention.

What a variant adds is in its record (``megasink.variants``); here are Megatron's interface, the
parameters and what is counted.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
T = S tokens, D head dim. Megatron hands over [S, B, heads, D] and takes [S, B, H * D]; packed
documents come as [T, heads, D].
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megasink.attention import (
    first_key_gate,
    first_key_share,
    gate_bias_gradient,
    gate_slope,
    similarity_attention,
)
from megasink.attention.layout import repeat_groups
from megasink.balance.tracker import OTHER_GRADIENT, SINK, HeadTracker
from megasink.config import COMM_TYPES, visible_tokens
from megasink.gate_options import counts_heads
from megasink.layers.context_parallel import (
    Attend,
    attend_alone,
    attend_to_gathered_keys,
    attend_with_scattered_heads,
)
from megasink.layers.documents import Documents, documents_of
from megasink.layers.importance import HeadCounter
from megasink.layers.position_bias import build_position_bias
from megasink.layers.similarity import SimilarityMLP
from megasink.layers.sink_rate import TOKENS, SinkRate
from megasink.layers.transformer_config import MegasinkTransformerConfig
from megasink.variants import parameter_names, variant


class CoreAttention(MegatronModule):
    """Attention of any variant, whose gates feed the head-balance loss (P0, P2.23 to P2.38).

    Args:
        config: with the options of ``AttentionOptions``, ``BiasOptions`` and ``SimilarityOptions``,
            and ``head_balance_coeff``.
        layer_number: 1-based index in the whole model.
        attn_mask_type: causal.
        attention_type: "self".
        cp_comm_type: under context parallelism "all_gather" (also for None) or "a2a".
        softmax_scale: factor of the scores; None for head_dim ** -0.5.
        pg_collection: with the groups ``tp`` and ``cp``.

    Attributes:
        variant: the record of ``config.attention_variant``. Each of its parameters is an attribute
            under its name, those of this rank's heads, float32 also where the model runs in bf16;
            those of other variants are None.
        relative_bias: gives the biases of ``attention_bias_type``; None for none.
        similarity_mlp: for the MLP similarity.
        documents: of the batch that ran last; None where it was not packed.

    Raises:
        ValueError: cross attention, a mask other than the causal one, context parallelism of
            another kind, or a prefix under all_gather.
    """

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
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.cp_comm_type = cp_comm_type or "all_gather"
        if self.cp_comm_type not in COMM_TYPES:
            raise ValueError(
                f"cp_comm_type {cp_comm_type!r}: context parallelism by {' or '.join(COMM_TYPES)}"
            )
        if self.cp_group.size() > 1 and config.prefix_lm_tokens and not self.scatters_heads:
            raise ValueError("a prefix may lie beyond a rank's chunks: use cp_comm_type 'a2a'")
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = visible_tokens(config.window_size) if windowed else None
        # An explicit gate may be the head's importance; then the one of the softmax is not.
        self.counts_heads = not counts_heads(config)

        self.head_counter = HeadCounter(config, layer_number, self.tp_group, self.cp_group.size())
        self.relative_bias = build_position_bias(config, self.tp_group)
        self.documents: Documents | None = None
        self.variant = variant(config.attention_variant)
        head_dim = config.kv_channels
        # Not torch.cuda.current_device() always, as upstream's: CPU initialisation means the CPU.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for name in parameter_names():
            self.register_parameter(name, None)
        for added in self.variant.parameters:
            shape, value = added.local_shape(config, self.tp_group.size()), added.initial(config)
            start = torch.full(shape, value, dtype=torch.float32, device=device)
            parameter = torch.nn.Parameter(start)
            if added.sharded(config):
                # Without these the gradient norm counts those of tensor-parallel rank 0 only.
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(added.name, parameter)
        self.similarity_mlp = None
        if config.attention_similarity == "mlp":
            self.similarity_mlp = SimilarityMLP(head_dim, dtype=config.params_dtype, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoreAttention":
        """Move with the module but stay float32: Float16Module turns every parameter into bf16."""
        kept = {name: p.data for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            parameter = self._parameters[name]
            assert parameter is not None
            moved = parameter.data
            parameter.data = moved.float() if before.is_meta else before.to(moved.device)
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
            NotImplementedError: an attention bias, packed sequences in another format, or under
                context parallelism.
        """
        if attention_bias is not None:
            raise NotImplementedError(
                "an attention bias is not supported by CoreAttention: --attention-bias-type has "
                "those that depend on the distance alone"
            )
        self.documents = documents_of(packed_seq_params, query.shape[0])
        if self.documents is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        # Recompute runs forward a first time without gradients: that run counts nothing.
        trains = self.training and torch.is_grad_enabled()
        counts = self.counts_heads and trains
        if trains and HeadTracker.observes and self.variant.logs_slot_logit:
            heads = query.shape[2]
            logit_1H1 = self.slot_logit(query.permute(1, 2, 0, 3))
            assert logit_1H1 is not None
            logit_H = logit_1H1.expand(1, heads, 1).flatten()
            HeadTracker.add(SINK, self.layer_number - 1, self.tp_group.rank() * heads, logit_H, 1)
        attend = self._softmax if self.config.attention_similarity == "softmax" else self._similar
        out_SBHD, gate_BHS = self._over_ranks(partial(attend, counts=counts), query, key, value)
        if self.config.attention_scale_alpha != 1.0:
            out_SBHD = out_SBHD * self.config.attention_scale_alpha
        out = out_SBHD.reshape(*out_SBHD.shape[:2], -1)
        if not counts or gate_BHS is None:
            return out
        slope_BHS = gate_slope(gate_BHS[..., None]) if self._observes else None
        counted: Tensor = self.head_counter(out, gate_BHS, self.documents, slope_BHS)
        return counted

    def _over_ranks(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`attend` over the sequence, wherever its tokens are: [S, B, H, D], and the gate."""
        if self.cp_group.size() == 1:
            return attend_alone(attend, query, key, value)
        if self.documents is not None:
            raise NotImplementedError(
                "packed documents under context parallelism: their chunks are not those of a "
                "sequence; use --context-parallel-size 1"
            )
        over = attend_with_scattered_heads if self.scatters_heads else attend_to_gathered_keys
        return over(attend, query, key, value, self.cp_group)

    @property
    def scatters_heads(self) -> bool:
        """Whether each context-parallel rank attends for a share of the heads alone."""
        return self.cp_group.size() > 1 and self.cp_comm_type == "a2a"

    def _own_share(self, by_heads: Tensor) -> Tensor:
        """Of a tensor [H, ...] the rows of the heads that this rank attends for."""
        if not self.scatters_heads:
            return by_heads
        return by_heads.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _softmax(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, *, counts: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output and gate of a variant of softmax attention."""
        balances = counts and self.config.head_balance_coeff > 0
        mask: dict[str, Any] = {"window": self.window, "prefix": self.config.prefix_lm_tokens}
        longest = key_BGSD.shape[2]
        if self.documents is not None:
            mask["cu_seqlens"] = self.documents.cu_seqlens
            longest = self.documents.longest
        if self.relative_bias is not None:
            bias_HS = self.relative_bias(longest, query_BHTD.device)
            mask["distance_bias_HS"] = self._own_share(bias_HS)
        parameters = {added.name: self._whole(added.name) for added in self.variant.parameters}
        out_BHTD, lse_BHT, gate_BHT = self.variant.attend(
            self.config,
            parameters,
            query_BHTD,
            key_BGSD,
            value_BGSD,
            **mask,
            scale=self.softmax_scale,
            backend=self.config.attention_kernel,
            with_gate=balances or self.variant.always_gated,
        )
        if SinkRate.collects and not self.training:
            first_BH = first_key_share(
                query_BHTD,
                key_BGSD,
                lse_BHT,
                TOKENS,
                scale=self.softmax_scale,
                window=self.window,
                distance_bias_HS=mask.get("distance_bias_HS"),
            )
            slot_BH = None
            if self.variant.always_gated and gate_BHT is not None:
                slot_BH = 1.0 - gate_BHT[..., :TOKENS].mean(-1)
            self._count_sinks(first_BH, slot_BH)
        elif gate_BHT is None and self.variant.always_gated:
            raise ValueError(
                f"attention variant {self.variant.name!r} returned no gate: with a slot it must"
            )
        elif counts and gate_BHT is None:
            gate_BHT = first_key_gate(
                query_BHTD, key_BGSD, lse_BHT, scale=self.softmax_scale, **mask
            )
        if counts and self._observes and gate_BHT is not None:
            assert self.variant.slot_value is not None  # refused by the config
            value_BHTD = self.variant.slot_value(
                self.config,
                {name: parameter.detach() for name, parameter in parameters.items()},
                partial(first_values, value_BGSD, out_BHTD.shape[1], mask.get("cu_seqlens")),
            )
            self._observe_gradient(out_BHTD, gate_BHT, value_BHTD)
        return out_BHTD, gate_BHT

    def slot_logit(self, query_BHTD: Tensor) -> Tensor | None:
        """The slot's logit for queries of all of this rank's heads, without gradient.

        Returns:
            broadcastable to [B, H, T]; None for a variant without a slot.

        Raises:
            ValueError: the variant's record does not say.
        """
        if self.variant.slot_logit is None:
            raise ValueError(f"attention variant {self.variant.name!r} has no slot_logit")
        scale = query_BHTD.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        own = {added.name: getattr(self, added.name).detach() for added in self.variant.parameters}
        return self.variant.slot_logit(self.config, own, query_BHTD.detach(), scale)

    @property
    def _observes(self) -> bool:
        """Whether the gradients at the gates are compared on this step."""
        return HeadTracker.observes and self.config.head_balance_coeff > 0

    def _observe_gradient(
        self, out_BHTD: Tensor, gate_BHT: Tensor, value_BHTD: Tensor | None
    ) -> None:
        """Record in the backward pass what comes through the output to the logit of the gate.

        Here and not where heads are counted: under context parallelism the first value is known
        here without a further message.
        """
        kept_BHTD, gate_BHT1 = out_BHTD.detach(), gate_BHT.detach()[..., None]
        batch, heads, tokens, _ = out_BHTD.shape
        count = batch * tokens if self.documents is None else self.documents.real_tokens
        first = heads * self.tp_group.rank()
        if self.scatters_heads:
            first = heads * (self.tp_group.rank() * self.cp_group.size() + self.cp_group.rank())

        def record(grad_BHTD: Tensor) -> None:
            sum_H = gate_bias_gradient(grad_BHTD, kept_BHTD, gate_BHT1, value_BHTD)
            HeadTracker.add(OTHER_GRADIENT, self.layer_number - 1, first, sum_H, count)

        out_BHTD.register_hook(record)

    def _similar(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, *, counts: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and 1 - the proxy weight of key 0 (P2.37): a statistic without gradient."""
        mlp = self.similarity_mlp
        out_BHTD, first_weight_BHT = similarity_attention(
            query_BHTD,
            key_BGSD,
            value_BGSD,
            similarity=self.config.attention_similarity,
            normalization=self.config.attention_normalization,
            mlp=None if mlp is None else mlp.weights(self.tp_group),
            window=self.window,
            scale=self.softmax_scale,
        )
        if SinkRate.collects and not self.training:
            self._count_sinks(first_weight_BHT[..., :TOKENS].mean(-1))
        return out_BHTD, 1.0 - first_weight_BHT

    def _count_sinks(self, first_BH: Tensor, slot_BH: Tensor | None = None) -> None:
        first = self.tp_group.rank() * first_BH.shape[1]
        SinkRate.record(self.layer_number - 1, first, first_BH, slot_BH)

    def _whole(self, name: str) -> Tensor:
        """A parameter; one that all heads share collects the gradients of every rank's heads."""
        parameter: torch.nn.Parameter = getattr(self, name)
        if getattr(parameter, "tensor_model_parallel", False):
            return self._own_share(parameter)
        shared: Tensor = copy_to_tensor_model_parallel_region(parameter, self.tp_group)
        return shared

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Parameters and tables of biases sharded by heads; those that heads share as copies."""
        state = self.state_dict(prefix="", keep_vars=True)
        by_heads = {
            name: parameter.partition_dim
            for name, parameter in state.items()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            by_heads,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def first_values(value_BGSD: Tensor, heads: int, cu_seqlens: Sequence[int] | None = None) -> Tensor:
    """The value of the first key of each token's document, without gradient.

    Returns:
        [B, H, 1, D]; [B, H, T, D] for packed documents.
    """
    first_T = torch.zeros(1, dtype=torch.int64)
    if cu_seqlens is not None:
        bounds = torch.tensor(cu_seqlens)
        first_T = bounds[:-1].repeat_interleave(bounds.diff())
    return repeat_groups(value_BGSD.detach()[:, :, first_T.to(value_BGSD.device)], heads)
