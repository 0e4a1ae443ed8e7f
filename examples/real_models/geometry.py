"""Two metrics of queries and keys for P0's Section 3.2; a plugin of `megasink analyze`.

Shapes: H query heads, G key/value groups, T tokens, D head dim.
"""

from torch import Tensor
from torch.nn.functional import normalize

from megasink.analysis.metrics import metric


@metric("query_cosine", source="P0.26", unit="cosine", axis="head", shown=("table",))
def query_cosine(query_HTD: Tensor) -> Tensor:
    """Mean over tokens from 1 on of cos(q_i, their mean): 1 if all queries have one direction."""
    query_HTD = query_HTD[:, 1:]
    return (normalize(query_HTD, dim=-1) @ _unit_mean(query_HTD)).squeeze(-1).mean(-1)


@metric("key_dimension", source="P0.26", unit="1", axis="head", shown=("table",))
def key_dimension(query_HTD: Tensor, key_GTD: Tensor) -> Tensor:
    """Effective dimension of the keys from 1 on: (tr C)^2 / tr C^2 of their covariance C."""
    key_GTD = key_GTD[:, 1:] - key_GTD[:, 1:].mean(1, keepdim=True)
    covariance_GDD = key_GTD.mT @ key_GTD
    trace_G = covariance_GDD.diagonal(dim1=-2, dim2=-1).sum(-1)
    dimension_G = trace_G**2 / covariance_GDD.square().sum((-2, -1))
    return dimension_G.repeat_interleave(len(query_HTD) // len(key_GTD))


def _unit_mean(rows_HTD: Tensor) -> Tensor:
    return normalize(rows_HTD.mean(1, keepdim=True), dim=-1).mT
