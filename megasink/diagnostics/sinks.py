"""Attention sinks: how much the tokens attend to token k, and how many heads have a sink (P2).

Positions count from 0 here: alpha_0 is the paper's alpha_1.

Shapes: N samples, L layers, H heads, T tokens, K the positions that were kept.
"""

import torch
from torch import Tensor

from megasink.diagnostics.registry import metric

EPSILON = 0.3
"""The threshold of the paper, with sequences of 64 tokens."""


@metric("alpha", paper="P2.1, P3.31", unit="1", axis="head column")
def alpha(column_sum_HT: Tensor) -> Tensor:
    """alpha_k: mean weight on key k of the queries from k on, k itself included."""
    tokens = column_sum_HT.shape[-1]
    queries_T = torch.arange(tokens, 0, -1, device=column_sum_HT.device)
    return column_sum_HT / queries_T


@metric("sink_position", paper="P3.31", unit="token", axis="head")
def sink_position(column_sum_HT: Tensor) -> Tensor:
    """The key of the highest alpha_k in the first half of the sequence: late keys have few rows."""
    return alpha(column_sum_HT)[:, : max(1, column_sum_HT.shape[-1] // 2)].argmax(-1)


@metric("sink_alpha", paper="P3.31", unit="1", axis="head")
def sink_alpha(column_sum_HT: Tensor) -> Tensor:
    """The highest alpha_k in the first half of the sequence, wherever it is."""
    return alpha(column_sum_HT)[:, : max(1, column_sum_HT.shape[-1] // 2)].amax(-1)


@metric("slot_alpha", paper="P2.27", unit="1", axis="head")
def slot_alpha(slot_weight_HT: Tensor) -> Tensor:
    """alpha_*: mean weight on the sink or key bias over the T queries; 0 where there is none."""
    return slot_weight_HT.mean(-1)


@metric("square_sum", paper="P4.13", unit="1", axis="layer position")
def square_sum(square_HT: Tensor) -> Tensor:
    """sum over keys of A_ij ** 2 of each row, mean over heads."""
    return square_HT.mean(0)


@metric("first_weight", paper="P3.23, P1.31", unit="1", axis="layer position")
def first_weight(first_weight_HT: Tensor) -> Tensor:
    """Weight on the first token by query position, mean over heads."""
    return first_weight_HT.mean(0)


def sink_rate(alpha_NLH: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Sink^eps_k: the share of heads with alpha_k > eps, per sequence and then averaged (P2.2).

    Args:
        alpha_NLH: alpha_k of one k; NaN where there is no head.
        epsilon: strict threshold.

    Returns:
        a scalar in [0, 1].
    """
    return layer_sink_rate(alpha_NLH, epsilon).nanmean()


def layer_sink_rate(alpha_NLH: Tensor, epsilon: float = EPSILON) -> Tensor:
    """[L]: as `sink_rate`, of each layer; NaN where it has no attention."""
    above_NLH = (alpha_NLH > epsilon).to(torch.float64)
    return above_NLH.masked_fill(alpha_NLH.isnan(), torch.nan).nanmean((0, 2))


def first_token_attention(awft_NLH: Tensor) -> Tensor:
    """[L]: F-Attn, the mean weight on the first token over heads, queries and samples (P1.31).

    The mean over layers is the paper's number.
    """
    return awft_NLH.to(torch.float64).nanmean((0, 2))
