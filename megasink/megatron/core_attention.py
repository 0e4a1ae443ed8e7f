"""The core-attention module inside Megatron's SelfAttention.

Variants are defined by their records (``megasink.attention.variants``). This module has Megatron's
interface and the parameters; the counting of heads is in ``megatron/layer_balance.py``.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
T = S tokens, D head dim. Megatron passes [S, B, heads, D] and expects [S, B, H * D]; a row of
packed documents has B = 1, and in Megatron's format thd is [T, heads, D].
"""

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megasink.attention import first_key_gate, first_key_share
from megasink.attention.constants import SINK_TOKENS
from megasink.attention.variants import parameter_names, variant
from megasink.attention.variants.gate_options import counts_heads
from megasink.balance.gate_sums import SINK
from megasink.balance.step import LossStep
from megasink.config import COMM_TYPES, visible_tokens
from megasink.megatron.layer_balance import HeadObserver, MegatronLayerBalance, check_batch
from megasink.megatron.parameters import ShardedByHeads, new_parameter, widened

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.microbatch_documents import Documents


class CoreAttention(ShardedByHeads, MegatronModule):
    """Attention of any variant, whose gates feed the head-balance loss (P0, P2.23 to P2.38).

    Attributes:
        variant: The record of ``config.attention_variant``. Each of its parameters is an attribute
            of the same name for this rank's heads, in the model's dtype; the mathematics uses
            `widened`. Parameters of other variants are None.
        documents: Documents of the last batch; None if it was not packed.
        frees_projection: Whether the last forward copied V, so that backward does not keep the
            projection [q, k, v].
        observer, attending: Observers of this rank's heads, and of the heads it attends for (a
            share of them under "a2a").
    """

    def __init__(
        self,
        config: "MegasinkTransformerConfig",
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        counted: bool = True,
        **_: Any,  # widths of keys and values, which latent attention gives
    ):
        if not counted:
            config = copy.copy(config)
            config.head_balance_coeff = 0.0
            layers, heads = config.num_layers, config.num_attention_heads
            config.statistics = LossStep(layers, heads, config, installed=True)
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(
                f"attention_type {attention_type!r}: megasink supports self-attention only"
            )
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(
                f"attention mask {attn_mask_type}: megasink supports the causal mask only"
            )
        self.config: MegasinkTransformerConfig = config
        self.layer_number = layer_number
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.cp_comm_type = cp_comm_type or "all_gather"
        if self.cp_comm_type not in COMM_TYPES:
            raise ValueError(
                f"cp_comm_type {cp_comm_type!r} is not supported: use {' or '.join(COMM_TYPES)}"
            )
        if self.cp_group.size() > 1 and config.prefix_lm_tokens and not self.scatters_heads:
            raise ValueError("a prefix may extend beyond a rank's chunks: use cp_comm_type 'a2a'")
        self.ring: Any = None
        if self.cp_group.size() > 1 and self.cp_comm_type == "p2p":
            from megasink.megatron.ring_attention import Ring

            self.ring = Ring(self.cp_group, config)
        self.softmax_scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = visible_tokens(config.window_size) if windowed else None
        self.counted = counted
        # If an explicit gate defines the head importance, the softmax gate does not.
        self.counts_heads = counted and not counts_heads(config)

        rank = self.tp_group.rank()
        self.observer = self.attending = HeadObserver(config, layer_number, rank)
        if self.scatters_heads:
            rank = rank * self.cp_group.size() + self.cp_group.rank()
            self.attending = HeadObserver(config, layer_number, rank)
        cp = self.cp_group.size()
        self.head_counter = MegatronLayerBalance(
            config, layer_number, self.tp_group, cp, pg_collection
        )
        self.relative_bias = None
        if config.attention_bias_type != "none":
            from megasink.megatron.position_biases import build_position_bias

            self.relative_bias = build_position_bias(config, self.tp_group)
        self.documents: Documents | None = None
        self.frees_projection = False
        self.variant = variant(config.attention_variant)
        # Unlike Megatron, which always uses the current CUDA device, honor CPU initialization.
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        for name in parameter_names():
            self.register_parameter(name, None)
        for added in self.variant.parameters:
            shape, value = added.local_shape(config, self.tp_group.size()), added.initial(config)
            axis = 0 if added.sharded(config) else None
            self.register_parameter(added.name, new_parameter(shape, value, config, axis=axis))
        self.similarity_mlp = None
        if config.attention_similarity == "mlp":
            from megasink.megatron.similarity_mlp import SimilarityMLP

            self.similarity_mlp = SimilarityMLP(
                config.kv_channels, dtype=config.params_dtype, device=device
            )

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
        """Compute attention for [S, B, H, D] queries and [S, B, G, D] keys and values."""
        if attention_bias is not None:
            raise NotImplementedError(
                "CoreAttention does not support an attention bias: use --attention-bias-type for "
                "biases that depend only on the distance"
            )
        if self.training and self.config.statistics.number <= 1:
            check_batch(self, attention_mask, value, packed_seq_params)
        self.documents = None
        if packed_seq_params is not None:
            from megasink.megatron.microbatch_documents import documents_of

            ranks = self.cp_group.size()
            self.documents = documents_of(packed_seq_params, query.shape[0], ranks)
        if query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        self.frees_projection = frees_projection(self, query, key, value)
        if self.frees_projection:
            value = value.contiguous()
        query_BHTD, key_BGSD, value_BGSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        # The first forward of activation recompute has no gradients and is not counted.
        trains = self.training and torch.is_grad_enabled()
        counts = self.counts_heads and trains
        if trains and self.observer.observes and self.variant.logs_slot_logit:
            logit_1H1 = self.slot_logit(query_BHTD)
            assert logit_1H1 is not None
            self.observer.add(SINK, logit_1H1.expand(1, query_BHTD.shape[1], 1).flatten(), 1)
        attend = self._softmax if self.config.attention_similarity == "softmax" else self._similar
        if self.cp_group.size() == 1 or self.ring is not None:
            out_BHTD, gate_BHT = attend(query_BHTD, key_BGSD, value_BGSD, counts=counts)
        else:
            from megasink.megatron.context_parallel import (
                attend_to_gathered_keys,
                attend_with_scattered_heads,
            )

            over = attend_with_scattered_heads if self.scatters_heads else attend_to_gathered_keys
            out_SBHD, gate_BHT = over(
                partial(attend, counts=counts), query, key, value, self.cp_group
            )
            out_BHTD = out_SBHD.permute(1, 2, 0, 3)
        if self.config.attention_scale_alpha != 1.0:
            out_BHTD = out_BHTD * self.config.attention_scale_alpha
        out = out_BHTD.permute(2, 0, 1, 3).flatten(2)
        if not counts or gate_BHT is None:
            return out
        counted: Tensor = self.head_counter(out, gate_BHT[..., None], self.documents)
        return counted

    @property
    def scatters_heads(self) -> bool:
        """Whether each context-parallel rank attends for only a share of the heads."""
        return self.cp_group.size() > 1 and self.cp_comm_type == "a2a"

    def _own_share(self, by_heads: Tensor) -> Tensor:
        """Return the rows of a tensor [H, ...] for the heads that this rank attends for."""
        if not self.scatters_heads:
            return by_heads
        return by_heads.chunk(self.cp_group.size())[self.cp_group.rank()]

    def _softmax(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, *, counts: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and gate of a softmax-attention variant."""
        # A model is built without the op and its kernels.
        from megasink.attention.functional import attention, slot_attention

        record, config = self.variant, self.config
        mask: dict[str, Any] = {"window": self.window, "prefix": config.prefix_lm_tokens}
        tokens, longest = query_BHTD.shape[2], key_BGSD.shape[2]
        counted = None
        if self.documents is not None:
            # A context-parallel rank has the keys up to the end of a chunk of queries.
            mask["cu_seqlens"] = self.documents.until(longest)
            counted = self.documents.real_in(longest - tokens, longest)
            longest = self.documents.longest
        if self.relative_bias is not None:
            bias_HS = self.relative_bias(longest, query_BHTD.device)
            mask["distance_bias_HS"] = self._own_share(bias_HS)
        parameters = {added.name: self._parameter(added.name) for added in record.parameters}
        options = {"scale": self.softmax_scale, "backend": config.attention_kernel, **mask}
        with_gate = record.always_gated or (counts and config.head_balance_coeff > 0)
        if self.ring is not None:
            attention, slot_attention = self.ring.attention, self.ring.slot_attention
            with_gate |= counts
        if record.attend is not None:
            out_BHTD, lse_BHT, gate_BHT = record.attend(
                config, parameters, query_BHTD, key_BGSD, value_BGSD, with_gate=with_gate, **options
            )
        elif record.always_gated:
            assert record.slot_logit is not None
            assert record.slot_value is not None
            logit = record.slot_logit(config, parameters, query_BHTD, self._scale(query_BHTD))
            assert logit is not None
            value = record.slot_value(config, parameters, _refuse_first_value)
            out_BHTD, lse_BHT, gate_BHT = slot_attention(
                query_BHTD, key_BGSD, value_BGSD, logit, value, **options
            )
        else:
            out_BHTD, lse_BHT, gate_BHT = attention(
                query_BHTD, key_BGSD, value_BGSD, with_gate=with_gate, **options
            )
        if gate_BHT is None and record.always_gated:
            raise ValueError(
                f"attention variant {record.name!r} has a slot, so its attend must return a gate"
            )
        if self.attending.counts_sinks and not self.training:
            first_BH = first_key_share(
                query_BHTD,
                key_BGSD,
                lse_BHT,
                SINK_TOKENS,
                scale=self.softmax_scale,
                window=self.window,
                distance_bias_HS=mask.get("distance_bias_HS"),
            )
            self.attending.count_sinks(first_BH, gate_BHT if record.always_gated else None)
        if counts and gate_BHT is None:
            gate_BHT = first_key_gate(
                query_BHTD, key_BGSD, lse_BHT, scale=self.softmax_scale, **mask
            )
        if counts and self.attending.compares_gradients and gate_BHT is not None:
            from megasink.megatron.microbatch_documents import first_values

            assert record.slot_value is not None  # rejected by the config
            if self.ring is not None and self.ring.first_value_BG1D is not None:
                value_BGSD = self.ring.first_value_BG1D
            value_BHTD = record.slot_value(
                config,
                {name: parameter.detach() for name, parameter in parameters.items()},
                partial(
                    first_values, value_BGSD, out_BHTD.shape[1], mask.get("cu_seqlens"), tokens
                ),
            )
            self.attending.output_gradient(out_BHTD, gate_BHT[..., None], value_BHTD, counted)
        return out_BHTD, gate_BHT

    def slot_logit(self, query_BHTD: Tensor) -> Tensor | None:
        """Return the slot logit for queries of all of this rank's heads, without gradient."""
        if self.variant.slot_logit is None:
            raise ValueError(f"attention variant {self.variant.name!r} has no slot_logit")
        names = [added.name for added in self.variant.parameters]
        own = {name: widened(getattr(self, name).detach()) for name in names}
        return self.variant.slot_logit(
            self.config, own, query_BHTD.detach(), self._scale(query_BHTD)
        )

    def _scale(self, query_BHTD: Tensor) -> float:
        return query_BHTD.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def _similar(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, *, counts: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and 1 - the proxy weight of key 0 (P2.37), without gradient."""
        from megasink.attention.similarity import similarity_attention

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
        if self.attending.counts_sinks and not self.training:
            self.attending.count_sinks(first_weight_BHT[..., :SINK_TOKENS].mean(-1))
        return out_BHTD, 1.0 - first_weight_BHT

    def _parameter(self, name: str) -> Tensor:
        """Return a parameter; gradients of one shared by all heads are summed over the ranks."""
        parameter: torch.nn.Parameter = getattr(self, name)
        wide = widened(parameter)
        if getattr(parameter, "tensor_model_parallel", False):
            return self._own_share(wide)
        shared: Tensor = copy_to_tensor_model_parallel_region(wide, self.tp_group)
        return shared


def _refuse_first_value() -> Tensor:
    raise ValueError("a variant whose slot has the value of a real key must define `attend`")


def frees_projection(layer: CoreAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether only V, a view of the projection [q, k, v], keeps it for backward.

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
