"""Head importance, head imbalance, and statistics of explicit gate scores.

Shapes: N samples, L layers, H heads, T tokens, X 1 or the head dim.
"""

import torch
from torch import Tensor

from megasink.analysis.metrics.registry import metric
from megasink.balance.loss import layer_imbalance

BINS = 100
"""Number of bins of the histogram of gate scores over [0, 1] (P1.29 shows bins of 0.01 to 0.02)."""


@metric(
    "importance",
    source="P0.10, P0.11",
    unit="share",
    axis="head",
    over_samples="mean over tokens",
    shown=("table", "heatmap", "rank"),
    title="head importance",
)
def mean_gate(gate_HT: Tensor) -> Tensor:
    """Mean gate of a head over all tokens: long samples count for more than short ones."""
    return gate_HT.mean(-1)


@metric(
    "imbalance",
    source="P0.13 (Eq. 6)",
    unit="1",
    axis="layer",
    shown=("table", "scalar"),
    title="head imbalance",
)
def imbalance(importance_LH: Tensor) -> Tensor:
    """Population std / mean of head importance over the heads of a layer; NaN without attention."""
    return layer_imbalance(importance_LH)


@metric(
    "gate_score",
    source="P1.28, P1.30",
    unit="share",
    axis="head",
    over_samples="mean over tokens",
    shown=("table", "scalar"),
)
def gate_score(explicit_gate_HTX: Tensor) -> Tensor:
    """Mean score of an explicit gate over tokens (and head dim)."""
    return explicit_gate_HTX.mean((-2, -1))


@metric("gate_std", source="P1.30", unit="share", axis="layer", shown=())
def gate_std(explicit_gate_HTX: Tensor) -> Tensor:
    """Population standard deviation of a layer's gate scores in one sample."""
    return explicit_gate_HTX.std(correction=0)


@metric("gate_min", source="P1.30", unit="share", axis="layer", over_samples="min")
def gate_min(explicit_gate_HTX: Tensor) -> Tensor:
    """Lowest gate score of a layer in one sample."""
    return explicit_gate_HTX.amin()


@metric("gate_max", source="P1.30", unit="share", axis="layer", over_samples="max")
def gate_max(explicit_gate_HTX: Tensor) -> Tensor:
    """Highest gate score of a layer in one sample."""
    return explicit_gate_HTX.amax()


@metric("abs_mean_before_gate", source="P1.35", unit="activation", axis="layer")
def abs_mean_before_gate(out_HTD: Tensor) -> Tensor:
    """Mean |value| of the SDPA output of a layer, before any gate."""
    return out_HTD.abs().mean()


@metric("abs_mean_after_gate", source="P1.35", unit="activation", axis="layer")
def abs_mean_after_gate(gated_out_HTD: Tensor) -> Tensor:
    """Mean |value| of the output projection's input."""
    return gated_out_HTD.abs().mean()


def below(values: Tensor, limit: float) -> Tensor:
    """Return the share of |values| strictly below a limit."""
    return (values.abs() < limit).count_nonzero().to(torch.float32) / values.numel()


def _register_sparsity(limit: float, suffix: str) -> None:
    """Register the share of |values| strictly below a limit, at three places (P1.36)."""

    def before_gate(out_HTD: Tensor) -> Tensor:
        return below(out_HTD, limit)

    def after_gate(gated_out_HTD: Tensor) -> Tensor:
        return below(gated_out_HTD, limit)

    def of_mean_gate(out_HTD: Tensor, explicit_gate_HTX: Tensor) -> Tensor:
        return below(out_HTD * explicit_gate_HTX.mean(), limit)

    for function, what in (
        (before_gate, "|values| of the SDPA output before a gate"),
        (after_gate, "|values| that enter the output projection"),
        (of_mean_gate, "|SDPA output times its layer's mean gate score| (the control)"),
    ):
        function.__doc__ = f"Share of {what} strictly below {suffix or '1e-2'}."
        name = f"sparsity_{function.__name__}" + (f"_{suffix}" if suffix else "")
        metric(name, source="P1.36", unit="share", axis="layer")(function)


_register_sparsity(1e-2, "")
_register_sparsity(1e-3, "1e-3")


@metric("gate_spread", source="P1.30", unit="share", axis="layer")
def gate_spread(gate_score_NLH: Tensor, gate_std_NL: Tensor, tokens_N: Tensor) -> Tensor:
    """Population standard deviation of a layer's gate scores over all tokens of all samples."""
    weight_N1 = (tokens_N.to(torch.float64) / tokens_N.sum())[:, None]
    mean_NL = gate_score_NLH.nanmean(-1)
    mean_L = (weight_N1 * mean_NL).sum(0)
    return (weight_N1 * (gate_std_NL.square() + (mean_NL - mean_L).square())).sum(0).sqrt()


def gate_histogram(explicit_gate_HTX: Tensor) -> Tensor:
    """[BINS]: counts of scores over [0, 1] (P1.29); sums over layers and samples stay exact."""
    return torch.histc(explicit_gate_HTX.float(), BINS, 0.0, 1.0).to(torch.int64)
