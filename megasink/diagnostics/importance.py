"""Head importance, head imbalance, and what the scores of explicit gates look like.

Shapes: N samples, L layers, H heads, T tokens, X 1 or the head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megasink.diagnostics.registry import metric

BINS = 100
"""Bins of the histogram of gate scores over [0, 1] (P1.29 shows bins of 0.01 to 0.02)."""


@metric("importance", paper="P0.10, P0.11", unit="1", axis="head")
def mean_gate(gate_HT: Tensor) -> Tensor:
    """Mean gate of a head over the tokens of one sequence; see `head_importance` over samples."""
    return gate_HT.mean(-1)


def head_importance(mean_gate_NLH: Tensor, tokens_N: Tensor) -> Tensor:
    """[L, H]: the mean gate over all tokens of all samples (P0.10, Eq. 5).

    By tokens, not a mean of the samples' means: long samples count for more.
    """
    weight_N = tokens_N.to(torch.float64) / tokens_N.sum()
    return torch.einsum("nlh,n->lh", mean_gate_NLH.to(torch.float64), weight_N)


def head_imbalance(importance_LH: Tensor) -> Tensor:
    """Mean over layers of std / mean of the importance, population std (P0.13, Eq. 6).

    Layers without attention (all NaN) do not count; a layer whose heads are all closed counts 0.
    """
    return layer_imbalance(importance_LH).nanmean()


def layer_imbalance(importance_LH: Tensor) -> Tensor:
    """[L]: std / mean over the heads of each layer; NaN where it has none."""
    mean_L1 = importance_LH.nanmean(-1, keepdim=True)
    std_L = (importance_LH - mean_L1).square().nanmean(-1).sqrt()
    return torch.where(mean_L1[:, 0] > 0, std_L / mean_L1[:, 0], torch.zeros_like(std_L) * std_L)


@metric("gate_score", paper="P1.28, P1.30", unit="1", axis="head")
def gate_score(explicit_gate_HTX: Tensor) -> Tensor:
    """Mean score of an explicit gate over tokens (and head dim)."""
    return explicit_gate_HTX.mean((-2, -1))


@metric("gate_std", paper="P1.30", unit="1", axis="layer")
def gate_std(explicit_gate_HTX: Tensor) -> Tensor:
    """Population standard deviation of a layer's gate scores in one sample."""
    return explicit_gate_HTX.std(correction=0)


@metric("gate_min", paper="P1.30", unit="1", axis="layer")
def gate_min(explicit_gate_HTX: Tensor) -> Tensor:
    """Lowest gate score of a layer in one sample."""
    return explicit_gate_HTX.amin()


@metric("gate_max", paper="P1.30", unit="1", axis="layer")
def gate_max(explicit_gate_HTX: Tensor) -> Tensor:
    """Highest gate score of a layer in one sample."""
    return explicit_gate_HTX.amax()


@metric("abs_mean_before_gate", paper="P1.35", unit="activation", axis="layer")
def abs_mean_before_gate(out_HTD: Tensor) -> Tensor:
    """Mean |value| of the SDPA output of a layer, before a gate."""
    return out_HTD.abs().mean()


@metric("abs_mean_after_gate", paper="P1.35", unit="activation", axis="layer")
def abs_mean_after_gate(gated_out_HTD: Tensor) -> Tensor:
    """Mean |value| of what enters the output projection."""
    return gated_out_HTD.abs().mean()


@metric("sparsity_before_gate", paper="P1.36", unit="share", axis="layer")
def sparsity_before_gate(out_HTD: Tensor) -> Tensor:
    """Share of |values| of the SDPA output below 1e-2, before a gate; strictly below."""
    return below(out_HTD, 1e-2)


@metric("sparsity_after_gate", paper="P1.36", unit="share", axis="layer")
def sparsity_after_gate(gated_out_HTD: Tensor) -> Tensor:
    """Share of |values| that enter the output projection below 1e-2; strictly below."""
    return below(gated_out_HTD, 1e-2)


@metric("sparsity_of_mean_gate", paper="P1.36", unit="share", axis="layer")
def sparsity_of_mean_gate(out_HTD: Tensor, explicit_gate_HTX: Tensor) -> Tensor:
    """The control: share below 1e-2 of the output times its layer's mean gate score."""
    return below(out_HTD * explicit_gate_HTX.mean(), 1e-2)


@metric("sparsity_before_gate_1e-3", paper="P1.36", unit="share", axis="layer")
def fine_sparsity_before_gate(out_HTD: Tensor) -> Tensor:
    """Share of |values| of the SDPA output below 1e-3, before a gate; strictly below."""
    return below(out_HTD, 1e-3)


@metric("sparsity_after_gate_1e-3", paper="P1.36", unit="share", axis="layer")
def fine_sparsity_after_gate(gated_out_HTD: Tensor) -> Tensor:
    """Share of |values| that enter the output projection below 1e-3; strictly below."""
    return below(gated_out_HTD, 1e-3)


@metric("sparsity_of_mean_gate_1e-3", paper="P1.36", unit="share", axis="layer")
def fine_sparsity_of_mean_gate(out_HTD: Tensor, explicit_gate_HTX: Tensor) -> Tensor:
    """The control: share below 1e-3 of the output times its layer's mean gate score."""
    return below(out_HTD * explicit_gate_HTX.mean(), 1e-3)


def below(values: Tensor, limit: float) -> Tensor:
    """Share of |values| strictly below a limit."""
    return (values.abs() < limit).to(torch.float32).mean()


class PooledGate(NamedTuple):
    """Gate scores of each layer over all tokens of all samples (P1.30), [L] each."""

    gate_score: Tensor
    gate_std: Tensor
    gate_min: Tensor
    gate_max: Tensor


def pooled_gate(
    score_NLH: Tensor, std_NL: Tensor, min_NL: Tensor, max_NL: Tensor, tokens_N: Tensor
) -> PooledGate:
    """From the samples' statistics to those of all tokens; NaN for layers without a gate.

    Not the means of the samples' deviations and extremes: how samples differ counts too.
    """
    weight_N1 = (tokens_N.to(torch.float64) / tokens_N.sum())[:, None]
    mean_NL = score_NLH.nanmean(-1)
    mean_L = (weight_N1 * mean_NL).sum(0)
    square_L = (weight_N1 * (std_NL.square() + (mean_NL - mean_L).square())).sum(0)
    return PooledGate(mean_L, square_L.sqrt(), min_NL.amin(0), max_NL.amax(0))


def gate_histogram(explicit_gate_HTX: Tensor) -> Tensor:
    """[BINS]: counts of scores over [0, 1] (P1.29); sums over layers and samples stay exact."""
    return torch.histc(explicit_gate_HTX.float(), BINS, 0.0, 1.0).to(torch.int64)
