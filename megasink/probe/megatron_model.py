"""Capture statistics from a Megatron-Core GPT with megasink's core attention, unsharded.

Hooks read the inputs and outputs of core attention; the forward pass is unchanged.

Shapes: S = T sequence, B batch, H query heads, G key/value groups, D head dim, E hidden size,
X = H * D.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megasink.diagnostics.registry import ATTENTION
from megasink.errors import ConfigError
from megasink.layers.core_attention import CoreAttention
from megasink.probe.geometry import Sites
from megasink.probe.megatron_sites import megatron_sites
from megasink.probe.segments import Segment
from megasink.probe.statistics import (
    MAP,
    AttentionCall,
    Observer,
    at_least_float32,
    attention_statistics,
)
from megasink.variants import variant


class Logits(NamedTuple):
    """Output of `MegatronProbe.forward`: logits [B, S, V] over the padded vocabulary."""

    logits: Tensor


class MegatronProbe:
    """Context manager in which `forward` runs the model and passes statistics to an observer.

    Args:
        model: in evaluation mode, whole in this process (see `megasink.checkpoint.load`).
        observer: receives the statistics of each sequence.
        needs: names of the statistics to capture (`megasink.diagnostics.STATISTICS`).

    Attributes:
        heads: H per layer.

    Raises:
        ConfigError: the model is sharded, or its attention is not megasink's; one message lists
            every reason.
    """

    def __init__(self, model: GPTModel, observer: Observer, needs: set[str]):
        problems = model_problems(model)
        if problems:
            raise ConfigError(problems)
        self.model = model
        self.observer = observer
        self.needs = set(needs)
        self.layers: list[Any] = list(model.decoder.layers)
        self.heads = [model.config.num_attention_heads] * len(self.layers)
        self._calls: dict[int, AttentionCall] = {}
        self._gates: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._segments: list[Segment] = []

    def __enter__(self) -> "MegatronProbe":
        for index, layer in enumerate(self.layers):
            self._attach(index, layer)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        *,
        logits: bool = True,
    ) -> Logits:
        """Run sequences of equal length.

        Raises:
            ValueError: a padding mask is given; batch sequences of equal length instead.
        """
        if attention_mask_BT is not None:
            raise ValueError("a Megatron model takes no padding mask: batch equal lengths")
        rows, tokens = input_ids_BT.shape
        self._segments = [Segment(row, 0, tokens) for row in range(rows)]
        if position_ids_BT is None:
            position_ids_BT = torch.arange(tokens, device=input_ids_BT.device).expand(rows, tokens)
        return Logits(self.model(input_ids_BT, position_ids_BT, None))

    def sites(self) -> Sites:
        """Return the sites; see `megasink.probe.geometry`."""
        return megatron_sites(self.model)

    def _attach(self, index: int, layer: Any) -> None:
        """Register read-only hooks on one layer."""
        attention, core = layer.self_attention, layer.self_attention.core_attention

        def before(module: torch.nn.Module, do: Any) -> None:
            def hook(_: Any, args: Any, kwargs: Any) -> None:
                do(args[0] if args else kwargs["hidden_states"])

            self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

        def after(module: torch.nn.Module, do: Any) -> None:
            self._hooks.append(module.register_forward_hook(lambda _, args, out: do(out)))

        if "state_TE" in self.needs:
            if index == 0:
                before(layer, lambda state: self._state(0, state))
            if self.model.config.post_norm:
                # Massive activations show only before the norm of the sum (P2.10, P2.42).
                before(layer.self_attn_bda.layernorm, lambda s: self._state(2 * index + 1, s))
                before(layer.mlp_bda.layernorm, lambda s: self._state(2 * index + 2, s))
            else:
                before(layer.pre_mlp_layernorm, lambda s: self._state(2 * index + 1, s))
                after(layer, lambda out: self._state(2 * index + 2, _first(out)))
        after(layer.mlp, lambda out: self._branch("mlp_branch_TE", index, _with_bias(out)))
        self._hooks.append(
            core.register_forward_hook(
                lambda _, args, kwargs, out: self._attended(index, core, args, kwargs, out),
                with_kwargs=True,
            )
        )
        if getattr(attention, "position", None) == "sdpa" and attention.gate is not None:
            after(attention.gate, lambda out: self._gates.update({index: out[1]}))
        before(attention.linear_proj, lambda gated: self._gated(index, attention, gated))
        after(attention, lambda out: self._finish(index, attention, _with_bias(out)))

    def _attended(
        self, index: int, core: CoreAttention, args: tuple[Any, ...], kwargs: Any, out_SBX: Tensor
    ) -> None:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = (named[n].permute(1, 2, 0, 3) for n in ("query", "key", "value"))
        bias = None
        if core.relative_bias is not None:
            bias = core.relative_bias(key.shape[2], query.device)
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
            distance_bias_HT=bias,
            similarity=core.config.attention_similarity,
            mlp=None if mlp is None else (mlp.fc1.weight.detach(), mlp.fc2.weight.detach()),
        )

    def _gated(self, index: int, attention: Any, gated_SBX: Tensor) -> None:
        call = self._calls[index]
        call.gated_out_BHTD = _by_head(gated_SBX, self.heads[index])
        gate_SBHC = self._gates.pop(index, None)
        if gate_SBHC is not None:
            call.explicit_gate_BHTX = gate_SBHC.permute(1, 2, 0, 3)
            call.gate_is_importance = attention.counts_heads

    def _finish(self, index: int, attention: Any, branch_SBE: Tensor) -> None:
        call = self._calls.pop(index)
        if "output_weight_HDE" in self.needs:
            weight_XE = attention.linear_proj.weight.detach().t()
            heads, head_dim = self.heads[index], call.out_BHTD.shape[-1]
            # With multi-head addition (P2.44) all heads share one [D, E].
            call.output_weight_HDE = weight_XE.reshape(-1, head_dim, weight_XE.shape[1])
            call.output_weight_HDE = call.output_weight_HDE.expand(heads, -1, -1)
        wanted = self.needs & {*ATTENTION, MAP}
        for sample, found in enumerate(attention_statistics(call, self._segments, wanted)):
            self.observer.layer(sample, index, found)
        self._branch("attention_branch_TE", index, branch_SBE)

    def _branch(self, name: str, index: int, branch_SBE: Tensor) -> None:
        if name in self.needs:
            for sample in range(branch_SBE.shape[1]):
                found = {name: at_least_float32(branch_SBE[:, sample])}
                self.observer.layer(sample, index, found)

    def _state(self, half: int, state_SBE: Tensor) -> None:
        for sample in range(state_SBE.shape[1]):
            self.observer.state(sample, half, at_least_float32(state_SBE[:, sample]))


def model_problems(model: GPTModel) -> list[str]:
    """Return one sentence for each reason that a model cannot be probed."""
    config, problems = model.config, []
    for name, flag in (
        ("tensor_model_parallel_size", "TP"),
        ("pipeline_model_parallel_size", "PP"),
        ("context_parallel_size", "CP"),
    ):
        size = getattr(config, name, 1)
        if size > 1:
            problems.append(f"the model is cut by {flag} {size}: load it whole into one process")
    record = variant(config.attention_variant)
    if record.slot_logit is None:
        problems.append(
            f"--attention-variant {record.name}: its record has no slot_logit, without which the "
            "weights of its heads are unknown: state it (megasink.variants.Variant)"
        )
    if model.training:
        problems.append("the model is in training mode: call model.eval()")
    for layer in model.decoder.layers:
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        if not isinstance(core, CoreAttention):
            problems.append(
                f"layer {layer.layer_number} has the attention of {type(core).__name__}: megasink "
                "reads its own core attention (megasink.specs)"
            )
            break
    return problems


def _by_head(out_SBX: Tensor, heads: int) -> Tensor:
    return out_SBX.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    return output[0] if output[1] is None else output[0] + output[1]
