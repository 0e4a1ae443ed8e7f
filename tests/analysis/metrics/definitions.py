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


Values = dict[str, Tensor]
"""Metric or fact -> what was measured of every sample, [N, ...], float64."""


def _over_samples(x: Values, name: str) -> Tensor:
    return torch.stack(list(x[name])).mean(0)


def _importance(x: Values) -> Tensor:
    shares = x["tokens"] / x["tokens"].sum()
    return sum(share * table for share, table in zip(shares, x["importance"], strict=True))


def _sink_rate(epsilon: float) -> Callable[[Values], Tensor]:
    def by_key(x: Values) -> Tensor:
        columns = range(x["alpha"].shape[-1])
        return torch.stack([(x["alpha"][..., k] > epsilon).double().mean() for k in columns])

    return by_key


def _layer_mean(score: str) -> Callable[[Values], Tensor]:
    return lambda x: (x[score] / x[score].mean(-1, keepdim=True)).mean(0)


def _prominent(x: Values) -> Tensor:
    ratio, attention = _over_samples(x, "massive_ratio"), x["awft"].mean((0, 2))
    for block in range(len(attention) - 1):
        if ratio[2 * block + 2] > 5 and attention[block + 1] > 0.3:
            return torch.tensor(float(block))
    return torch.tensor(math.nan)


def _stage(x: Values) -> Tensor:
    rates, block = _sink_rate(0.3)(x), float(_prominent(x))
    most = rates.max()
    if most < 0.05:
        return torch.tensor(0.0)
    if (rates > most / 2).sum() > 1:
        return torch.tensor(1.0)
    if rates[0] < most:
        return torch.tensor(2.0)
    layers = x["awft"].shape[1]
    return torch.tensor(3.0 if math.isnan(block) else 5.0 if block < layers / 3 else 4.0)


def _spread(x: Values) -> Tensor:
    """From raw moments: E(g^2) of each sample is its variance and squared mean."""
    shares = (x["tokens"] / x["tokens"].sum())[:, None]
    mean = x["gate_score"].mean(-1)
    square = (shares * (x["gate_std"] ** 2 + mean**2)).sum(0)
    return (square - (shares * mean).sum(0) ** 2).sqrt()


def _even(x: Values) -> Tensor:
    """alpha_k of a matrix of weights whose rows are even."""
    kept = []
    for tokens in x["tokens"].int().tolist():
        weights_TT = torch.ones(tokens, tokens, dtype=torch.float64).tril()
        weights_TT /= weights_TT.sum(-1, keepdim=True)
        keys = range(x["alpha"].shape[-1])
        kept.append([weights_TT[k:, k].mean() if k < tokens else math.nan for k in keys])
    return torch.tensor(kept).nanmean(0)


DERIVED: dict[str, Callable[[Values], Tensor]] = {
    "even_weight": _even,
    **{
        f"{score}_ln": _layer_mean(score)
        for score in ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon", "circuit_ahon")
    },
    "lthon_hn": lambda x: (x["lthon"] / x["ahon"]).mean(0),
    "random": lambda x: torch.rand(
        x["awft"].shape, generator=torch.Generator().manual_seed(int(x["seed"])), dtype=torch.double
    ).mean(0),
    "imbalance": lambda x: _importance(x).std(-1, correction=0) / _importance(x).mean(-1),
    "gate_spread": _spread,
    "nats_per_token": lambda x: x["nats"].sum() / x["targets"].sum(),
    "perplexity": lambda x: math.e ** (x["nats"].sum() / x["targets"].sum()),
    "bits_per_byte": lambda x: x["nats_of_bytes"].sum() / x["bytes"].sum() * math.log2(math.e),
    "sink_rate_0.2": _sink_rate(0.2),
    "sink_rate": _sink_rate(0.3),
    "sink_rate_0.4": _sink_rate(0.4),
    "sink_rate_0.5": _sink_rate(0.5),
    "sink_rate_key_1": lambda x: (x["alpha"][..., 1] > 0.3).double().mean(),
    "sink_rate_key_2": lambda x: (x["alpha"][..., 2] > 0.3).double().mean(),
    "sink_rate_by_layer": lambda x: (x["alpha"][..., 0] > 0.3).double().mean((0, 2)),
    "first_token_attention": lambda x: x["awft"].mean((0, 2)),
    "slot_attention": lambda x: x["slot_alpha"].mean((0, 2)),
    "heads_over_drain_threshold": lambda x: (x["awft"] > 0.75).double().mean(),
    "sink_rate_anywhere": lambda x: (x["sink_alpha"] > 0.3).double().mean(),
    "cosine_across_inputs": lambda x: x["cosine"],
    "prominent_after_block": _prominent,
    "sink_centre": lambda x: x["alpha"].mean((0, 1, 2)).argmax(),
    "sink_centre_by_direction": lambda x: x["cosine"][1:, : x["alpha"].shape[-1]].mean(0).argmax(),
    "circuit_stage": _stage,
}
"""Of the metrics that are made of others, over whole samples without blanks."""
