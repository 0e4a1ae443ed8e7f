"""Every intervention by its definition, on whole score matrices in float64, with plain loops.

Shapes: B rows, H query heads, G key/value groups, T tokens, S = T keys, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tests.analysis.metrics import definitions
from tests.analysis.metrics.definitions import Layer

NAME = "oracle_of_interventions"

Definition = Callable[[int, Layer], Tensor]
"""(layer, what attention did in one sequence) -> what enters the output projection, [H, T, D]."""


@dataclass
class Oracle:
    """A transformers model whose attention is computed by definition, and changed by another.

    The projections stay those of the model, in its dtype. Sequences are whole rows.
    """

    model: Any
    define: Definition
    layers: list[list[Layer]] = field(default_factory=list)
    seen: list[list[Layer]] = field(default_factory=list)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits under the intervention; `seen` then has each layer's sequences before it."""
        base, hooks = self.model.config._attn_implementation, []
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
        self.model.set_attn_implementation(NAME)
        self.seen = []
        try:
            hooks = [
                module.register_forward_pre_hook(self._project)
                for name, module in self.model.named_modules()
                if name.split(".")[-1] in ("o_proj", "c_proj") and "mlp" not in name
            ]
            return self.model(ids, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
            self.model.set_attn_implementation(base)
            del AttentionInterface._global_mapping[NAME]
            del AttentionMaskInterface._global_mapping[NAME]

    def _attend(self, module: Any, query, key, value, mask, **kwargs: Any):
        projection = getattr(module, "o_proj", None)
        weight = projection.weight.T if projection is not None else module.c_proj.weight
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        rows = [
            definitions.layer_of(
                *(x[row] for x in (query, key, value)),
                weight.unflatten(0, (query.shape[1], -1)),
                scale=scale,
                window=kwargs.get("sliding_window"),
                sink_H=kwargs.get("s_aux"),
            )
            for row in range(len(query))
        ]
        self.layers.append(rows)
        out = torch.stack([row.out_HTD for row in rows]).transpose(1, 2)
        return out.to(query.dtype), None

    def _project(self, _: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        (rows,) = self.layers
        self.layers.clear()
        (gated_BTX,) = args
        changed = []
        for row, layer in enumerate(rows):
            heads = len(layer.query_HTD)
            gated_HTD = gated_BTX[row].double().unflatten(-1, (heads, -1)).transpose(0, 1)
            gate_HTD = gated_HTD / layer.out_HTD
            if (gate_HTD - 1).abs().max() > 1e-2:  # there is an explicit gate
                layer = replace(layer, gate_HTX=gate_HTD)
            rows[row] = layer
            changed.append(self.define(len(self.seen), layer).transpose(0, 1).flatten(1))
        self.seen.append(rows)
        return (torch.stack(changed).to(gated_BTX.dtype),)


def nothing(_: int, layer: Layer) -> Tensor:
    return layer.gated_HTD


def zeroed(heads: list[tuple[int, int]]) -> Definition:
    """Chosen heads give 0."""

    def define(index: int, layer: Layer) -> Tensor:
        out_HTD = layer.gated_HTD.clone()
        for where, head in heads:
            if where == index:
                out_HTD[head] = 0.0
        return out_HTD

    return define


def scores(name: str, layer: Layer) -> list[float]:
    """The score of each head, from those of the paper by loops over the heads."""
    base = name.removesuffix("_ln").removesuffix("_hn")
    own = definitions.ATTENTION[base](layer).tolist()
    if name.endswith("_ln"):
        return [score / (sum(own) / len(own)) for score in own]
    if name.endswith("_hn"):
        average = definitions.ATTENTION["ahon"](layer).tolist()
        return [score / a for score, a in zip(own, average, strict=True)]
    return own


def inactive(name: str, tau: float, layer: Layer) -> list[bool]:
    above = name.startswith("awft")
    return [s > tau if above else s < tau for s in scores(name, layer)]


def dynamic(name: str, tau: float) -> Definition:
    """Heads whose score crosses the threshold give 0."""

    def define(index: int, layer: Layer) -> Tensor:
        out_HTD = layer.gated_HTD.clone()
        for head, off in enumerate(inactive(name, tau, layer)):
            if off:
                out_HTD[head] = 0.0
        return out_HTD

    return define


def drained(tau: float | None) -> Definition:
    """v_0 := 0 for heads whose mean weight on key 0 exceeds tau; the weights stay."""

    def define(index: int, layer: Layer) -> Tensor:
        out_HTD = layer.gated_HTD.clone()
        for head, weights_TS in enumerate(layer.weights_HTS):
            if tau is not None and not weights_TS[:, 0].mean() > tau:
                continue
            value_SD = layer.value_HTD[head].clone()
            value_SD[0] = 0.0
            out_HTD[head] = weights_TS @ value_SD
            if layer.gate_HTX is not None:
                out_HTD[head] *= layer.gate_HTX[head]
        return out_HTD

    return define


def steered(
    heads: list[tuple[int, int]], scale: float = 1.0, low: float = 0.0, high: float = 1.0
) -> Definition:
    """G of chosen heads is scaled and clamped; of a sink, G = 1 - its weight."""

    def define(index: int, layer: Layer) -> Tensor:
        out_HTD = layer.gated_HTD.clone()
        for where, head in heads:
            if where != index:
                continue
            if layer.gate_HTX is not None:
                gate_TX, ungated_TD = layer.gate_HTX[head], layer.out_HTD[head]
            else:
                gate_TX = 1 - layer.slot_HT[head][:, None]
                plain_TS = layer.weights_HTS[head] / layer.weights_HTS[head].sum(-1, keepdim=True)
                ungated_TD = plain_TS @ layer.value_HTD[head]
            out_HTD[head] = (scale * gate_TX).clamp(low, high) * ungated_TD
        return out_HTD

    return define


def gap(values: list[float], share: float) -> float:
    """A threshold amid the widest gap near a quantile, so that rounding moves no score over it."""
    ordered = sorted(set(values))
    middle = int(share * len(ordered))
    near = range(max(middle - 3, 0), min(middle + 3, len(ordered) - 1))
    widest = max(near, key=lambda i: ordered[i + 1] - ordered[i])
    return (ordered[widest] + ordered[widest + 1]) / 2
