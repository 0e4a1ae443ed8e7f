"""Norms and angles of queries, keys, values and head outputs by token position.

Shapes: H query heads, G key/value groups, T tokens, D head dim.
"""

from functools import partial

import torch
from torch import Tensor

from megasink.analysis.metrics.registry import metric

by_position = partial(metric, unit="L2 norm", axis="layer position", shown=())
curve = partial(by_position, shown=("curve",), figure="values")


@curve("value_norm", source="P0.5, P2.8, P0.4", title="values, norm(v_i)")
def value_norm(value_GTD: Tensor) -> Tensor:
    """Norm of the value of each token, mean over key/value groups."""
    return value_GTD.norm(dim=-1).mean(0)


@curve("key_norm", source="P2.8", title="keys, norm(k_i)")
def key_norm(key_GTD: Tensor) -> Tensor:
    """Norm of the key of each token after rotary embeddings, mean over key/value groups."""
    return key_GTD.norm(dim=-1).mean(0)


@curve("query_norm", source="P2.9", title="queries, norm(q_i)")
def query_norm(query_HTD: Tensor) -> Tensor:
    """Norm of the query of each token after rotary embeddings, mean over heads."""
    return query_HTD.norm(dim=-1).mean(0)


@curve("first_key_cosine", source="P2.9", unit="cosine", title="cos(q_i, first key)")
def first_key_cosine(query_HTD: Tensor, key_GTD: Tensor) -> Tensor:
    """cos(q_t, k_0) of each token, mean over heads."""
    query_GRTD = _unit(query_HTD).unflatten(0, (key_GTD.shape[0], -1))
    first_G1D1 = _unit(key_GTD[:, :1]).unsqueeze(1).transpose(-1, -2)
    return (query_GRTD @ first_G1D1).squeeze(-1).mean((0, 1))


@curve("other_key_cosine", source="P2.9", unit="cosine", title="cos(q_i, other keys)")
def other_key_cosine(query_HTD: Tensor, key_GTD: Tensor) -> Tensor:
    """Mean over keys 1 <= j <= t of cos(q_t, k_j), mean over heads; NaN for t = 0."""
    key_GTD = _unit(key_GTD)
    behind_GTD = key_GTD.cumsum(1) - key_GTD[:, :1]
    count_T1 = torch.arange(key_GTD.shape[1], device=key_GTD.device)[:, None]
    mean_G1TD = (behind_GTD / count_T1).unsqueeze(1)
    query_GRTD = _unit(query_HTD).unflatten(0, (key_GTD.shape[0], -1))
    return (query_GRTD * mean_G1TD).sum(-1).mean((0, 1))


@by_position("first_key_product", source="P2.9", unit="L2 norm ** 2")
def first_key_product(query_HTD: Tensor, key_GTD: Tensor) -> Tensor:
    """norm(q_t) norm(k_0) of each token, mean over heads."""
    norm_GRT = query_HTD.norm(dim=-1).unflatten(0, (key_GTD.shape[0], -1))
    return (norm_GRT * key_GTD[:, :1].norm(dim=-1).unsqueeze(1)).mean((0, 1))


@by_position("other_key_product", source="P2.9", unit="L2 norm ** 2")
def other_key_product(query_HTD: Tensor, key_GTD: Tensor) -> Tensor:
    """Mean over keys 1 <= j <= t of norm(q_t) norm(k_j), mean over heads; NaN for t = 0."""
    norm_GT = key_GTD.norm(dim=-1)
    count_T = torch.arange(norm_GT.shape[1], device=norm_GT.device)
    mean_G1T = ((norm_GT.cumsum(1) - norm_GT[:, :1]) / count_T).unsqueeze(1)
    norm_GRT = query_HTD.norm(dim=-1).unflatten(0, (key_GTD.shape[0], -1))
    return (norm_GRT * mean_G1T).mean((0, 1))


@by_position("output_norm", source="P3.25")
def output_norm(gated_out_HTD: Tensor) -> Tensor:
    """Norm of a head's output at each token, after any gate, before W_O; mean over heads."""
    return gated_out_HTD.norm(dim=-1).mean(0)


def _unit(rows_XTD: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows_XTD, dim=-1)
