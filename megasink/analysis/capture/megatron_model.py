"""Capture statistics from a Megatron-Core GPT or hybrid with megasink's attention, unsharded.

Hooks read the inputs and outputs of core attention; without changes the forward pass is unchanged.

Shapes: S = T sequence, B batch, H query heads, G key/value groups, D head dim, E hidden size,
F intermediate size, X = H * D.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megasink.analysis.capture.attention_statistics import AttentionCall
from megasink.analysis.capture.first_block_tensors import (
    BLOCKS,
    PRODUCT,
    UP,
    Site,
    Sites,
    fused_norm,
    tensor_of,
)
from megasink.analysis.capture.head_changes import ForwardPass, HeadChange
from megasink.analysis.capture.probe import Listener, Probe
from megasink.analysis.capture.segments import Segment
from megasink.attention.variants import variant
from megasink.errors import UserError
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.microbatch_documents import first_values
from megasink.megatron.model_blocks import ModelBlock, blocks_in


class Logits(NamedTuple):
    """Output of `MegatronProbe.forward`: logits [B, S, V] over the padded vocabulary."""

    logits: Tensor


class MegatronProbe(Probe):
    """A probe of a Megatron model that is whole in this process, in evaluation mode."""

    def __init__(
        self, model: LanguageModule, listener: Listener, changes: Sequence[HeadChange] = ()
    ):
        super().__init__(model_problems(model), listener, changes)
        self.model: LanguageModule = model
        self.body = model
        self.layers: list[ModelBlock] = blocks_in(model)
        self.heads = heads_by_layer(model)

    def forward(
        self, ids_BT: Tensor, mask_BT: Any = None, positions_BT: Any = None, *, logits: bool = True
    ) -> Logits:
        """Run sequences of equal length."""
        if mask_BT is not None:
            raise UserError("a Megatron model accepts no padding mask: batch texts of one length")
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        with torch.set_grad_enabled(self.differentiates):
            return Logits(self.model(ids_BT, positions_BT, None))

    def _called(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids_BQ = args[0] if args else kwargs["input_ids"]
        if kwargs.get("packed_seq_params") is not None:
            raise UserError("the model of a run accepts no packed documents: pass them one by one")
        context = kwargs.get("inference_context")
        cached = 0 if context is None else int(context.sequence_len_offset)
        rows, new = ids_BQ.shape
        if self.reads_attention and context is not None:
            raise UserError(
                "in a run, interventions that read attention need whole sequences: generate "
                "without them, or export the run (megasink convert-to-hf)"
            )
        segments = [Segment(row, 0, cached + new) for row in range(rows)]
        self._begin(ForwardPass(rows, new, cached, segments, ids_BQ))

    def sites(self) -> Sites:
        sites = Sites(context=self.model.config.prefix_lm_tokens)
        blocks = blocks_in(self.model)
        _add_mlp(sites, blocks[0].mlp, self.model.config)
        for index, block in enumerate(blocks[:BLOCKS]):
            for half, layer, norm_name, linear in (
                (2 * index, block.mixer, "input_layernorm", ("self_attention", "linear_qkv")),
                (2 * index + 1, block.ffn, "pre_mlp_layernorm", ("mlp", "linear_fc1")),
            ):
                norm = getattr(layer, norm_name, None)
                reader = getattr(getattr(layer, linear[0], None), linear[1], None)
                read: Any = lambda _, out: _batch_first(out)  # noqa: E731
                if isinstance(norm, IdentityOp | None):
                    # TransformerEngine's LayerNormLinear does not expose the normed state.
                    fused = getattr(reader, "layer_norm_weight", None) is not None
                    norm, read = (reader, partial(_normed, reader)) if fused else (None, None)
                sites.add_norm(half, norm, read)
        return sites

    def _output_weight(self, index: int) -> Tensor:
        attention = self.layers[index].attention
        weight_XE = attention.linear_proj.weight.detach().t()
        head_dim = attention.hidden_size_per_attention_head
        # With multi-head addition (P2.44) all heads share one [D, E].
        return weight_XE.unflatten(0, (-1, head_dim)).expand(self.heads[index], -1, -1)

    def _attach(self, index: int, block: ModelBlock) -> None:
        def branch(out: Any) -> None:
            self._branch("mlp_branch_TE", index, _batch_first(_with_bias(out)))

        if "state_TE" in self.needs:
            self._attach_states(index, block)
        if "mlp_branch_TE" in self.needs and block.mlp is not None:
            self._after(block.mlp, branch)
        if (attention := block.attention) is None:
            return
        attended = partial(self._attended, index)
        core = attention.core_attention
        self._hooks.append(core.register_forward_hook(attended, with_kwargs=True))
        if getattr(attention, "position", None) == "sdpa" and attention.gate is not None:
            self._after(attention.gate, lambda out: self._gates.update({index: out[1]}))
        self._before(attention.linear_proj, lambda gated: self._gated(index, attention, gated))
        self._after(attention, lambda out: self._finish(index, _batch_first(_with_bias(out))))

    def _attach_states(self, index: int, block: ModelBlock) -> None:
        def keep(half: int) -> Callable[[Any], None]:
            return lambda output: self._state(half, _batch_first(output))

        if index == 0:
            self._before(block.first, keep(0))
        adds = (getattr(block.mixer, "self_attn_bda", None), getattr(block.ffn, "mlp_bda", None))
        norms: list[Any] = [getattr(add, "layernorm", None) for add in adds]
        if self.model.config.post_norm and None not in norms:
            # Massive activations show only before the norm of the sum (P2.10, P2.42).
            self._before(norms[0], keep(2 * index + 1))
            self._before(norms[1], keep(2 * index + 2))
            return
        if block.ffn is None:
            self._after(block.mixer, keep(2 * index + 1))
        else:
            self._before(block.ffn.pre_mlp_layernorm, keep(2 * index + 1))
        self._after(block.last, keep(2 * index + 2))

    def _attended(
        self, index: int, core: CoreAttention, args: tuple[Any, ...], kwargs: Any, out_SBX: Tensor
    ) -> None:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = (named[n].permute(1, 2, 0, 3) for n in ("query", "key", "value"))
        bias = core.relative_bias
        scale = query.shape[-1] ** -0.5 if core.softmax_scale is None else core.softmax_scale
        mlp = core.similarity_mlp
        self._calls[index] = AttentionCall(
            query,
            key,
            value,
            _by_head(out_SBX, query.shape[1]),
            scale=scale,
            window=core.window,
            prefix=core.config.prefix_lm_tokens,
            slot_logit_BHT=core.slot_logit(query),
            distance_bias_HT=None if bias is None else bias(key.shape[2], query.device),
            similarity=core.config.attention_similarity,
            out_scale=core.config.attention_scale_alpha,
            slot_has_value=_slot_has_value(core, value, query.shape[1]),
            mlp=None if mlp is None else (mlp.fc1.weight.detach(), mlp.fc2.weight.detach()),
        )

    def _gated(self, index: int, attention: Any, gated_SBX: Tensor) -> Tensor | None:
        call = self._calls[index]
        call.gated_out_BHTD = _by_head(gated_SBX, self.heads[index])
        gate_SBHC = self._gates.pop(index, None)
        if gate_SBHC is not None:
            call.explicit_gate_BHTX = gate_SBHC.permute(1, 2, 0, 3)
            call.gate_is_importance = attention.counts_heads
        new_BSHD = self._changed(index, call.gated_out_BHTD.transpose(1, 2))
        if new_BSHD is None:
            return None
        call.gated_out_BHTD = new_BSHD.transpose(1, 2)
        return new_BSHD.transpose(0, 1).reshape(gated_SBX.shape)


def heads_by_layer(model: LanguageModule) -> list[int]:
    """Return the number of heads of each block; 0 for one without attention."""
    heads: int = model.config.num_attention_heads
    return [0 if block.attention is None else heads for block in blocks_in(model)]


def model_problems(model: LanguageModule) -> list[str]:
    """Return one sentence for each reason that a model cannot be probed."""
    config, problems = model.config, []
    for name, flag in (
        ("tensor_model_parallel_size", "TP"),
        ("pipeline_model_parallel_size", "PP"),
        ("context_parallel_size", "CP"),
    ):
        size = getattr(config, name, 1)
        if size > 1:
            problems.append(f"the model is sharded by {flag} {size}: load it whole in one process")
    record = variant(config.attention_variant)
    if record.slot_logit is None:
        problems.append(
            f"--attention-variant {record.name}: its record has no slot_logit, so the attention "
            "weights of its heads are unknown: set it (megasink.attention.variants.Variant)"
        )
    if model.training:
        problems.append("the model is in training mode: call model.eval()")
    for number, block in enumerate(blocks_in(model)):
        core = getattr(block.attention, "core_attention", None)
        if block.attention is not None and not isinstance(core, CoreAttention):
            problems.append(
                f"layer {number} uses {type(core).__name__}: megasink can only read "
                "its own core attention (megasink.megatron)"
            )
            break
    return problems


def _slot_has_value(core: CoreAttention, value_BGTD: Tensor, heads: int) -> bool:
    """Return whether the slot has a value: biases have one, sinks do not."""
    value_of = core.variant.slot_value
    own = {added.name: getattr(core, added.name).detach() for added in core.variant.parameters}
    first = partial(first_values, value_BGTD, heads, tokens=value_BGTD.shape[2])
    return value_of is None or value_of(core.config, own, first) is not None


def _by_head(out_SBX: Tensor, heads: int) -> Tensor:
    return out_SBX.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _add_mlp(sites: Sites, mlp: Any, config: Any) -> None:
    down, up = getattr(mlp, "linear_fc2", None), getattr(mlp, "linear_fc1", None)
    if down is None or up is None:
        experts = "block 0 has experts, which have no common activation"
        sites.missing[PRODUCT] = sites.missing[UP] = (
            "block 0 has no FFN" if mlp is None else experts
        )
        return
    sites.available.append(Site(PRODUCT, down, lambda product, _: _batch_first(product)))

    def read_up(_: Tensor, output: tuple[Tensor, Tensor | None]) -> Tensor:
        linear_SBF = _with_bias(output)
        if config.gated_linear_unit:  # rows are [gate; up]
            linear_SBF = linear_SBF.chunk(2, -1)[1]
        return _batch_first(linear_SBF)

    sites.available.append(Site(UP, up, read_up))


def _normed(linear: Any, state_SBE: Tensor, _: Any) -> Tensor:
    return _batch_first(fused_norm(linear, state_SBE))


def _batch_first(output: Any) -> Tensor:
    """Return the output of a Megatron module, [S, B, ...], as [B, S, ...]."""
    return tensor_of(output).transpose(0, 1)


def _with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the output of a Megatron linear, which leaves its bias to be added."""
    return output[0] if output[1] is None else output[0] + output[1]
