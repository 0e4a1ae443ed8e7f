"""Every metric by its definition: S x S weights in float64, loops and plain formulas.

Shapes: H query heads, G key/value groups, T tokens, S = T keys, D head dim, E hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Layer:
    """One sequence in one layer, float64; `weights_HTS` are those of the real keys.

    `is_proxy`: they are no softmax, and do not quite sum to 1 (P2.37).
    """

    query_HTD: Tensor
    key_HTD: Tensor
    value_HTD: Tensor
    weights_HTS: Tensor
    slot_HT: Tensor
    out_HTD: Tensor
    gate_HTX: Tensor | None
    output_weight_HDE: Tensor
    groups: int
    is_proxy: bool = False

    @property
    def gated_HTD(self) -> Tensor:
        return self.out_HTD if self.gate_HTX is None else self.out_HTD * self.gate_HTX


def layer_of(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    output_weight_HDE: Tensor,
    *,
    scale: float,
    window: int | None = None,
    prefix: int = 0,
    sink_H: Tensor | None = None,
    bias_HT: Tensor | None = None,
    softcap: float | None = None,
    gate_HTX: Tensor | None = None,
) -> Layer:
    """Attention by its definition, in float64."""
    heads, tokens = query_HTD.shape[:2]
    groups = key_GTD.shape[0]
    query, key, value = (x.double() for x in (query_HTD, key_GTD, value_GTD))
    key, value = (x.repeat_interleave(heads // groups, 0) for x in (key, value))
    scores = scale * query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    if bias_HT is not None:
        scores = scores + bias_HT.double()[:, distance.clamp(min=0)]
    hidden = (distance < 0) & (torch.arange(tokens) >= prefix)
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    sink = torch.full((heads, tokens, 1), -torch.inf, dtype=torch.float64)
    if sink_H is not None:
        by_token = sink_H.double().reshape(heads, -1, 1)  # [H], or [H, T]
        sink = by_token.expand(heads, tokens, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)
    real = weights[..., :-1]
    gate = None if gate_HTX is None else gate_HTX.double()
    out = real @ value
    slot = weights[..., -1]
    return Layer(query, key, value, real, slot, out, gate, output_weight_HDE.double(), groups)


def similarity_layer_of(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    output_weight_HDE: Tensor,
    *,
    similarity: str,
    normalization: str = "row-sum",
    scale: float,
    window: int | None = None,
    mlp: tuple[Tensor, Tensor] | None = None,
) -> Layer:
    """Attention with a similarity (P2.30), in float64; its weights are the proxies of P2.37."""
    heads, tokens = query_HTD.shape[:2]
    groups = key_GTD.shape[0]
    query, key, value = (x.double() for x in (query_HTD, key_GTD, value_GTD))
    key, value = (x.repeat_interleave(heads // groups, 0) for x in (key, value))

    def phi(x: Tensor) -> Tensor:
        if similarity == "elu-kernel":
            return torch.where(x > 0, x + 1, x.exp())
        if mlp is not None:
            first, second = (weight.double() for weight in mlp)
            return (x @ first.T).clamp(min=0) @ second.T
        return x

    z = scale * phi(query) @ phi(key).transpose(-1, -2)
    w = {"sigmoid": lambda: 1 / (1 + (-z).exp()), "elu-plus-one": lambda: _elu_plus_one(z)}
    weights = w.get(similarity, lambda: z)()
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    weights = weights.masked_fill(hidden, 0.0)
    out = weights @ value
    if normalization == "row-sum":
        signed = similarity in ("identity", "mlp")
        total = weights.sum(-1, keepdim=True)
        out = out / (total.abs().clamp(min=1) if signed else total + 1e-8)
    proxy = weights.abs() / (weights.abs().sum(-1, keepdim=True) + 1e-8)
    slot = torch.zeros(heads, tokens, dtype=torch.float64)
    weight = output_weight_HDE.double()
    return Layer(query, key, value, proxy, slot, out, None, weight, groups, is_proxy=True)


def _elu_plus_one(z: Tensor) -> Tensor:
    return torch.where(z > 0, z + 1, z.exp())


def _entropy(layer: Layer) -> Tensor:
    outcomes = torch.cat([layer.weights_HTS, layer.slot_HT[..., None]], -1)
    return -torch.special.xlogy(outcomes, outcomes).sum(-1)


def _gate(layer: Layer) -> Tensor:
    if layer.gate_HTX is not None:
        return layer.gate_HTX.mean(-1)
    if layer.slot_HT.any():
        return layer.weights_HTS.sum(-1)
    if layer.is_proxy:
        return 1 - layer.weights_HTS[..., 0]
    return layer.weights_HTS[..., 1:].sum(-1)


def _alpha(layer: Layer) -> Tensor:
    heads, tokens = layer.query_HTD.shape[:2]
    table = torch.zeros(heads, tokens, dtype=torch.float64)
    for k in range(tokens):
        table[:, k] = layer.weights_HTS[:, k:, k].sum(-1) / (tokens - k)
    return table


def _cosines(layer: Layer) -> Tensor:
    return torch.nn.functional.cosine_similarity(
        layer.query_HTD[:, :, None], layer.key_HTD[:, None], dim=-1
    )


def _products(layer: Layer) -> Tensor:
    return layer.query_HTD.norm(dim=-1)[:, :, None] * layer.key_HTD.norm(dim=-1)[:, None]


def _mean_over_others(pairs_HTS: Tensor) -> Tensor:
    tokens = pairs_HTS.shape[1]
    rows = [
        pairs_HTS[:, t, 1 : t + 1].mean() if t else torch.tensor(math.nan) for t in range(tokens)
    ]
    return torch.stack([row.double() for row in rows])


def _circuit(layer: Layer) -> Tensor:
    return (layer.gated_HTD @ layer.output_weight_HDE).norm(dim=-1).mean(-1)


def _share_below(values: Tensor, limit: float) -> Tensor:
    return torch.tensor(sum(abs(v) < limit for v in values.flatten().tolist()) / values.numel())


ATTENTION: dict[str, Callable[[Layer], Tensor]] = {
    "awft": lambda x: x.weights_HTS[..., 0].mean(-1),
    "aeqd": lambda x: _entropy(x).mean(-1),
    "ftvvn": lambda x: x.value_HTD[:, 0].norm(dim=-1),
    "avvn": lambda x: x.value_HTD.norm(dim=-1).mean(-1),
    "lthon": lambda x: x.gated_HTD[:, -1].norm(dim=-1),
    "ahon": lambda x: x.gated_HTD.norm(dim=-1).mean(-1),
    "circuit_ahon": _circuit,
    "importance": lambda x: _gate(x).mean(-1),
    "gate_score": lambda x: x.gate_HTX.flatten(1).mean(-1),
    "gate_std": lambda x: x.gate_HTX.flatten().var(correction=0).sqrt(),
    "gate_min": lambda x: x.gate_HTX.min(),
    "gate_max": lambda x: x.gate_HTX.max(),
    "abs_mean_before_gate": lambda x: x.out_HTD.abs().mean(),
    "abs_mean_after_gate": lambda x: x.gated_HTD.abs().mean(),
    "sparsity_before_gate": lambda x: _share_below(x.out_HTD, 1e-2),
    "sparsity_after_gate": lambda x: _share_below(x.gated_HTD, 1e-2),
    "sparsity_of_mean_gate": lambda x: _share_below(x.out_HTD * x.gate_HTX.mean(), 1e-2),
    "sparsity_before_gate_1e-3": lambda x: _share_below(x.out_HTD, 1e-3),
    "sparsity_after_gate_1e-3": lambda x: _share_below(x.gated_HTD, 1e-3),
    "sparsity_of_mean_gate_1e-3": lambda x: _share_below(x.out_HTD * x.gate_HTX.mean(), 1e-3),
    "alpha": _alpha,
    "sink_position": lambda x: _alpha(x)[:, : x.query_HTD.shape[1] // 2].argmax(-1),
    "sink_alpha": lambda x: _alpha(x)[:, : x.query_HTD.shape[1] // 2].amax(-1),
    "slot_alpha": lambda x: x.slot_HT.mean(-1),
    "square_sum": lambda x: (x.weights_HTS**2).sum(-1).mean(0),
    "first_weight": lambda x: x.weights_HTS[..., 0].mean(0),
    "value_norm": lambda x: x.value_HTD.norm(dim=-1).mean(0),
    "key_norm": lambda x: x.key_HTD.norm(dim=-1).mean(0),
    "query_norm": lambda x: x.query_HTD.norm(dim=-1).mean(0),
    "output_norm": lambda x: x.gated_HTD.norm(dim=-1).mean(0),
    "first_key_cosine": lambda x: _cosines(x)[..., 0].mean(0),
    "other_key_cosine": lambda x: _mean_over_others(_cosines(x)),
    "first_key_product": lambda x: _products(x)[..., 0].mean(0),
    "other_key_product": lambda x: _mean_over_others(_products(x)),
}
"""Of the metrics that take attention's statistics."""

STATE: dict[str, Callable[[Tensor], Tensor]] = {
    "state_norm": lambda x: x.square().sum(-1).sqrt(),
    "massive_ratio": lambda x: (
        x[0].square().sum().sqrt()
        / torch.stack([row.square().sum().sqrt() for row in x[1:]]).mean()
    ),
    "state_abs_max": lambda x: max(x.max(), -x.min()),
    "attention_abs_max": lambda x: max(x.max(), -x.min()),
    "mlp_abs_max": lambda x: max(x.max(), -x.min()),
    "attention_branch_norm": lambda x: x.square().sum(-1).sqrt(),
}
"""Of the metrics that take hidden states."""
