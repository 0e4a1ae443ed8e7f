"""The core-attention module inside Megatron's SelfAttention.

Variants are defined by their records (``megasink.attention.variants``). This module has Megatron's
interface and the parameters; the counting of heads is in ``megatron/layer_balance.py``.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
T = S tokens, D head dim. Megatron passes [S, B, heads, D] and expects [S, B, H * D]; a row of
packed documents has B = 1, and in Megatron's format thd is [T, heads, D].
"""

import copy
import warnings
import weakref
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
from torch.distributed import ProcessGroup

from megasink import attention as ops
from megasink.attention.variants import parameter_names, variant
from megasink.attention.variants.gate_options import counts_heads
from megasink.balance.step import LossStep
from megasink.config import COMM_TYPES, visible_tokens
from megasink.megatron.layer_balance import MegatronLayerBalance
from megasink.megatron.parameters import ShardedByHeads, new_parameter, widened

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.head_observer import HeadObserver
    from megasink.megatron.microbatch_documents import Documents


class CoreAttention(ShardedByHeads, MegatronModule):
    """Attention of any variant, whose gates feed the head-balance loss (P0, P2.23 to P2.38).

    Each parameter of the variant is an attribute for this rank's heads, in the model's dtype; the
    mathematics uses `widened`. Parameters of other variants are None.
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
        if (attention_type, attn_mask_type) != ("self", AttnMaskType.causal):
            raise ValueError(
                f"attention_type {attention_type!r} with the mask {attn_mask_type}: megasink "
                "supports only self-attention under a causal mask"
            )
        self.config: MegasinkTransformerConfig = config
        self.layer_number = layer_number
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.cp_comm_type = cp_comm_type or "all_gather"
        if self.cp_comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type {cp_comm_type!r}: use {' or '.join(COMM_TYPES)}")
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

        self.head_counter = MegatronLayerBalance(
            config, layer_number, self.tp_group, self.cp_group.size(), pg_collection
        )
        self.relative_bias = None
        if config.attention_bias_type != "none":
            from megasink.megatron.position_biases import build_position_bias

            self.relative_bias = build_position_bias(config, self.tp_group)
        self.documents: Documents | None = None  # of the last batch, if it was packed
        self.frees_projection = False  # whether the last forward copied V, so that [q, k, v] goes
        self.variant = variant(config.attention_variant)
        for name in parameter_names():
            self.register_parameter(name, None)
        for added in self.variant.parameters:
            shape, value = added.local_shape(config, self.tp_group.size()), added.initial(config)
            axis = 0 if added.sharded(config) else None
            self.register_parameter(added.name, new_parameter(shape, value, config, axis=axis))
        self.similarity_mlp = None
        if config.attention_similarity == "mlp":
            from megasink.megatron.similarity_mlp import SimilarityMLP

            self.similarity_mlp = SimilarityMLP(config)

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
        trains = self.training and torch.is_grad_enabled()
        counts = self.counts_heads and trains
        if trains and (observer := self.observer()) is not None:
            observer.slot_logit(self, query_BHTD)
        attend: Any = self._softmax
        if self.config.attention_similarity != "softmax":
            from megasink.megatron.similarity_mlp import attend_by_similarity

            attend = partial(attend_by_similarity, self)
        if self.cp_group.size() == 1 or self.ring is not None:
            out_BHTD, gate_BHT = attend(query_BHTD, key_BGSD, value_BGSD, counts=counts)
        else:
            from megasink.megatron import context_parallel as cp

            over = cp.attend_to_gathered_keys
            if self.scatters_heads:
                over = cp.attend_with_scattered_heads
            call = partial(attend, counts=counts)
            out_SBHD, gate_BHT = over(call, query, key, value, self.cp_group)
            out_BHTD = out_SBHD.permute(1, 2, 0, 3)
        if self.config.attention_scale_alpha != 1.0:
            out_BHTD = out_BHTD * self.config.attention_scale_alpha
        out = out_BHTD.permute(2, 0, 1, 3).flatten(2)
        if not counts or gate_BHT is None:
            return out
        counted: Tensor = self.head_counter(out, gate_BHT[..., None], self.documents)
        return counted

    def observer(self, *, attending: bool = False) -> "HeadObserver | None":
        """Return the observer of this rank's heads, if the step or the evaluation is observed.

        `attending`: of the heads for which it attends, a share of them under "a2a".
        """
        statistics = self.config.statistics
        if not statistics.heads.observes and statistics.sinks is None:
            return None
        from megasink.megatron.head_observer import HeadObserver

        rank = self.tp_group.rank()
        if attending and self.scatters_heads:
            rank = rank * self.cp_group.size() + self.cp_group.rank()
        return HeadObserver(self.config, self.layer_number, rank)

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
        calls: Any = ops  # a model is built without the op and its kernels
        if self.ring is not None:
            calls, with_gate = self.ring, with_gate or counts
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
            out_BHTD, lse_BHT, gate_BHT = calls.slot_attention(
                query_BHTD, key_BGSD, value_BGSD, logit, value, **options
            )
        else:
            out_BHTD, lse_BHT, gate_BHT = calls.attention(
                query_BHTD, key_BGSD, value_BGSD, with_gate=with_gate, **options
            )
        if gate_BHT is None and record.always_gated:
            raise ValueError(
                f"attention variant {record.name!r} has a slot, so its attend must return a gate"
            )
        if counts and gate_BHT is None:
            gate_BHT = ops.first_key_gate(
                query_BHTD, key_BGSD, lse_BHT, scale=self.softmax_scale, **mask
            )
        if (observer := self.observer(attending=True)) is not None:
            call = (query_BHTD, key_BGSD, value_BGSD, out_BHTD, lse_BHT, gate_BHT)
            observer.softmax(self, call, mask, parameters, counts=counts, counted=counted)
        return out_BHTD, gate_BHT

    def slot_logit(self, query_BHTD: Tensor) -> Tensor | None:
        """Return the slot logit for queries of all of this rank's heads, without gradient."""
        if self.variant.slot_logit is None:
            raise ValueError(f"attention variant {self.variant.name!r} has no slot_logit")
        own = {p.name: widened(getattr(self, p.name).detach()) for p in self.variant.parameters}
        scale = self._scale(query_BHTD)
        return self.variant.slot_logit(self.config, own, query_BHTD.detach(), scale)

    def _scale(self, query_BHTD: Tensor) -> float:
        return query_BHTD.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

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
    config, recomputes = layer.config, layer.config.recompute_granularity == "selective"
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


# Masks and batches that are checked, and equal tokens at the end of a row that are padding.
_CHECKED, _PADDING = 64, 8


def check_batch(core: CoreAttention, mask: Tensor | None, value_sBGD: Tensor, packed: Any) -> None:
    """Raise ValueError for a mask that is not causal; warn of padding; both wait for the device."""
    statistics, group = core.config.statistics, core.cp_group
    seen = statistics.mask is not None and statistics.mask() is mask
    if mask is not None and not seen and statistics.masks < _CHECKED:
        statistics.mask, statistics.masks = weakref.ref(mask), statistics.masks + 1
        _refuse_other(mask, group)
    unmarked = statistics.may_pad and packed is None and statistics.factors.real is None
    # The values of a first layer are those of the tokens, and the sequence ends on rank 0.
    if unmarked and core.layer_number == 1 and group.rank() == 0:
        statistics.may_pad = not _warn_of_padding(value_sBGD)


def _refuse_other(mask: Tensor, group: ProcessGroup) -> None:
    columns = mask.shape[-1]
    causal_SS = torch.ones(columns, columns, dtype=torch.bool, device=mask.device).triu(1)
    if group.size() > 1:
        from megasink.megatron.context_parallel import own_chunks

        causal_SS = own_chunks(causal_SS, group.size(), group.rank())
    rows = mask.shape[-2]
    if rows > len(causal_SS) or not torch.equal(mask.bool(), causal_SS[:rows].expand_as(mask)):
        raise ValueError(
            f"an attention mask {list(mask.shape)} is not causal, and megasink's attention would "
            "ignore it: pass None, mark documents with packed_seq_params, and padding with "
            "set_real_tokens"
        )


def _warn_of_padding(value_sBGD: Tensor) -> bool:
    """Warn if a row ends with the same token so often that it is padding."""
    length = min(_PADDING, len(value_sBGD) // 4)
    end_sBGD = value_sBGD[len(value_sBGD) - length :]
    same_B = (end_sBGD == end_sBGD[-1:]).flatten(2).all(2).all(0)
    found = length > 1 and bool(same_B.any())
    if found:
        warnings.warn(
            f"{int(same_B.sum())} of {len(same_B)} rows end with {length} or more equal tokens, "
            "which count in the head importance: mark padding with set_real_tokens of the "
            "HeadBalance",
            stacklevel=2,
        )
    return found
