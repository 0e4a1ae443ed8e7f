"""Streamed attention statistics for non-softmax similarities, through proxy weights (P2.37).

A_ij = |w_ij| / (sum_j |w_ij| + 1e-8), independent of the normalization of the layer's output: the
sink metrics of P2 for the similarities of P2.30 to P2.36. A row whose weights are all 0 (a dead
ReLU) attends to nothing.

Shapes: B batch, H query heads, G key/value groups, T tokens, D head dim; tiles as in `tiles`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasink.analysis.metrics.maps import whole_scores
from megasink.analysis.metrics.tiles import HIDDEN, tiles
from megasink.analysis.metrics.weights import WeightStatistics, column_sums, first_and_others
from megasink.attention.definitions import PROXY_EPSILON

# |w| as a function of z, and the score of a hidden key, for which |w| is 0.
_WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sigmoid": (torch.sigmoid_, HIDDEN),
    "elu-plus-one": (lambda z: z.clamp(max=0.0).exp_().add_(z.relu_()), HIDDEN),
    "elu-kernel": (torch.abs_, 0.0),
    "identity": (torch.abs_, 0.0),
    "mlp": (torch.abs_, 0.0),
}
SIMILARITIES = tuple(_WEIGHTS)


@torch.no_grad()
def proxy_statistics(
    query_BHTD: Tensor, key_BGTD: Tensor, *, similarity: str, **options: Any
) -> WeightStatistics:
    """Compute statistics of the proxy weights of causal attention, without an S x S matrix.

    Queries and keys are phi(q) and phi(k) if the similarity has a feature map. The gate is 1 -
    A_i0, by sums; the entropy of a row is -sum_j A_ij ln A_ij. O(T^2 D) work; O(T) memory and two
    tiles.
    """
    if similarity not in _WEIGHTS:
        raise ValueError(f"unknown similarity {similarity!r}: one of {', '.join(SIMILARITIES)}")
    weights_of, hidden = _WEIGHTS[similarity]
    statistics = WeightStatistics.room_for(query_BHTD, key_BGTD)
    first, _, gate, entropy, square, column_sum = statistics
    for n, rows, columns, score_NRCK in tiles(query_BHTD, key_BGTD, hidden=hidden, **options):
        weight_NRCK = weights_of(score_NRCK)
        first_NRC, others_NRC = first_and_others(weight_NRCK, columns)
        real_NRC = first_NRC + others_NRC
        total_NRC = real_NRC + PROXY_EPSILON
        first[n, :, rows] = first_NRC / total_NRC
        gate[n, :, rows] = (others_NRC + PROXY_EPSILON) / total_NRC
        column_sum[n, :, columns] += column_sums(weight_NRCK, total_NRC)
        logs_NRC = torch.special.xlogy(weight_NRCK, weight_NRCK).sum(-1)
        entropy[n, :, rows] = (total_NRC.log() * real_NRC - logs_NRC) / total_NRC
        square[n, :, rows] = weight_NRCK.square_().sum(-1) / total_NRC.square()
    entropy.clamp_(min=0.0)
    return statistics.by_head(query_BHTD.shape[0])


@torch.no_grad()
def proxy_maps(query_HTD: Tensor, key_GTD: Tensor, *, similarity: str, **options: Any) -> Tensor:
    """Return the proxy weights [H, T, S] of one sequence (P2.37); 0 for invisible keys."""
    weights_of, hidden = _WEIGHTS[similarity]
    weight_HTS = weights_of(whole_scores(query_HTD, key_GTD, hidden=hidden, **options))
    return weight_HTS / (weight_HTS.sum(-1, keepdim=True) + PROXY_EPSILON)
