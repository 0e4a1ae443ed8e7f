"""Attention sinks: attention to token k, and the share of heads with a sink (P2).

Positions count from 0 here: alpha_0 is the paper's alpha_1.

Shapes: N samples, L layers, H heads, T tokens, K kept positions.
"""

from functools import partial

import torch
from torch import Tensor

from megasink.analysis.metrics import head_scores  # noqa: F401  # awft, used by metrics here
from megasink.analysis.metrics.registry import metric
from megasink.attention.constants import SINK_EPSILON

EPSILONS = {0.2: "sink_rate_0.2", 0.3: "sink_rate", 0.4: "sink_rate_0.4", 0.5: "sink_rate_0.5"}
"""Threshold -> the metric of its sink rate (P2.3)."""

LATER_KEYS = (1, 2)
"""Later keys that also have a sink rate (P2 Table 7)."""

DRAIN = 0.75
"""tau of Eq. 9 in P0."""

curve = partial(metric, unit="share", shown=("table", "curve"), figure="sinks")


@metric("alpha", source="P2.1, P3.31", unit="1", axis="head column", shown=())
def alpha(column_sum_HT: Tensor) -> Tensor:
    """alpha_k: mean weight on key k over the queries from k on, k itself included."""
    tokens = column_sum_HT.shape[-1]
    queries_T = torch.arange(tokens, 0, -1, device=column_sum_HT.device)
    return column_sum_HT / queries_T


@metric("sink_position", source="P3.31", unit="token", axis="head", over_samples="median")
def sink_position(column_sum_HT: Tensor) -> Tensor:
    """Key of the highest alpha_k in the first half of the sequence: late keys have few rows."""
    return alpha(column_sum_HT)[:, : max(1, column_sum_HT.shape[-1] // 2)].argmax(-1)


@metric("sink_alpha", source="P3.31", unit="1", axis="head")
def sink_alpha(column_sum_HT: Tensor) -> Tensor:
    """Highest alpha_k in the first half of the sequence, at any position."""
    return alpha(column_sum_HT)[:, : max(1, column_sum_HT.shape[-1] // 2)].amax(-1)


@metric("slot_alpha", source="P2.27", unit="1", axis="head")
def slot_alpha(slot_weight_HT: Tensor) -> Tensor:
    """alpha_*: mean weight on the sink or key bias over the T queries; 0 if there is none."""
    return slot_weight_HT.mean(-1)


@metric("square_sum", source="P4.13", unit="1", axis="layer position", shown=())
def square_sum(square_HT: Tensor) -> Tensor:
    """sum over keys of A_ij ** 2 of each row, mean over heads."""
    return square_HT.mean(0)


@metric("first_weight", source="P3.23, P1.31", unit="1", axis="layer position", shown=())
def first_weight(first_weight_HT: Tensor) -> Tensor:
    """Weight on the first token by query position, mean over heads."""
    return first_weight_HT.mean(0)


def sink_rate(alpha_NLH: Tensor, epsilon: float = SINK_EPSILON) -> Tensor:
    """Return Sink^eps_k: the share of heads with alpha_k > eps, averaged over sequences (P2.2)."""
    return layer_sink_rate(alpha_NLH, epsilon).nanmean()


def layer_sink_rate(alpha_NLH: Tensor, epsilon: float = SINK_EPSILON) -> Tensor:
    """Return [L]: `sink_rate` of each layer; NaN for layers without attention."""
    above_NLH = (alpha_NLH > epsilon).to(torch.float64)
    return above_NLH.masked_fill(alpha_NLH.isnan(), torch.nan).nanmean((0, 2))


def _register_sink_rate(name: str, epsilon: float) -> None:
    def sink_rate_by_key(alpha_NLHK: Tensor) -> Tensor:
        return torch.stack([sink_rate(alpha_NLH, epsilon) for alpha_NLH in alpha_NLHK.unbind(-1)])

    sink_rate_by_key.__doc__ = f"Share of the heads with a sink on key k: alpha_k > {epsilon:g}."
    is_main = epsilon == SINK_EPSILON
    shown = ("table", "scalar", "curve") if is_main else ("table",)
    title = f"sink rate, eps {epsilon:g}"
    curve(name, source="P2.2, P2.3", axis="key", shown=shown, title=title, key=0)(sink_rate_by_key)


for _epsilon, _name in EPSILONS.items():
    _register_sink_rate(_name, _epsilon)


def _register_later_sink_rate(key: int) -> None:
    def later_sink_rate(alpha_NLHK: Tensor) -> Tensor:
        kept = alpha_NLHK.shape[-1] > key
        return sink_rate(alpha_NLHK[..., key]) if kept else torch.tensor(torch.nan)

    later_sink_rate.__doc__ = f"Share of the heads with a sink on key {key}: alpha_{key} > 0.3."
    name = f"sink_rate_key_{key}"
    metric(name, source="P2.2, P2.16", unit="share", axis="model", shown=("scalar",), key=key)(
        later_sink_rate
    )


for _key in LATER_KEYS:
    _register_later_sink_rate(_key)


@curve("sink_rate_by_layer", source="P2.2", axis="layer", title="heads with a sink on token 0")
def first_key_sink_rate(alpha_NLHK: Tensor) -> Tensor:
    """Share of the layer's heads with a sink on the first token: alpha_0 > 0.3."""
    return layer_sink_rate(alpha_NLHK[..., 0])


@curve(
    "first_token_attention",
    source="P1.31",
    axis="layer",
    shown=("table", "curve", "scalar"),
    title="weight on the first token",
    key=0,
)
def first_token_attention(awft_NLH: Tensor) -> Tensor:
    """F-Attn, the mean weight on the first token over heads, queries and samples."""
    return awft_NLH.to(torch.float64).nanmean((0, 2))


@metric(
    "even_weight",
    source="the mean of 1/T sum_i 1/(i + 1) over samples, for key 0",
    unit="share",
    axis="key",
    shown=(),
)
def even_weight(alpha_NLHK: Tensor, tokens_N: Tensor) -> Tensor:
    """alpha_k of a head that attends evenly to all tokens so far: (1/(k+1) + ... + 1/T) / (T - k).

    The mean over the samples that have a token k.
    """
    even_NK = tokens_N.new_full((len(tokens_N), alpha_NLHK.shape[-1]), torch.nan)
    row_T = 1 / torch.arange(1, int(tokens_N.max()) + 1, dtype=torch.float64)
    for even_K, tokens in zip(even_NK, tokens_N.to(torch.int64).tolist(), strict=True):
        for key in range(min(len(even_K), tokens)):
            even_K[key] = row_T[key:tokens].mean()
    return even_NK.nanmean(0)


@curve("slot_attention", source="P2.27", axis="layer", title="weight on the sink or bias")
def slot_attention(slot_alpha_NLH: Tensor) -> Tensor:
    """Mean weight on a learnable sink or bias over heads, queries and samples."""
    return slot_alpha_NLH.nanmean((0, 2))


@metric("heads_over_drain_threshold", source="P0.28 (Eq. 9)", unit="share", axis="model", key=0)
def heads_over_drain_threshold(awft_NLH: Tensor) -> Tensor:
    """Share of the heads with awft > 0.75, per sequence and then averaged."""
    return sink_rate(awft_NLH, DRAIN)


@metric("sink_rate_anywhere", source="P3.31", unit="share", axis="model", key=0)
def sink_rate_anywhere(sink_alpha_NLH: Tensor) -> Tensor:
    """Share of the heads, of all samples, with a sink on some token: max_k alpha_k > 0.3."""
    sinks = (sink_alpha_NLH > SINK_EPSILON).sum()
    return sinks / (~sink_alpha_NLH.isnan()).sum().to(torch.float64)


def sink_positions(sink_position_NLH: Tensor, sink_alpha_NLH: Tensor) -> dict[str, float]:
    """{token: share of the heads with a sink on it}; sums to `sink_rate_anywhere` (P3.31)."""
    there = sink_position_NLH[sink_alpha_NLH > SINK_EPSILON].to(torch.int64)
    positions, counts = there.unique(return_counts=True)
    heads = int((~sink_alpha_NLH.isnan()).sum())
    return {str(int(p)): int(c) / heads for p, c in zip(positions, counts, strict=True)}
