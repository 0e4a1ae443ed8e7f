"""Attention maps of short sequences: the only S x S statistic, computed only on request.

Shapes: H query heads, G key/value groups, T tokens, S = T keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from megasink.analysis.metrics.tiles import HIDDEN, tiles
from megasink.attention.definitions import MAP_TOKENS


def attention_maps(
    query_HTD: Tensor, key_GTD: Tensor, *, slot_logit_HT: Tensor | None = None, **options: Any
) -> Tensor:
    """Return weights [H, T, S] of a causal layer; rows sum to the gate of a slot (P0.2)."""
    score_HTS = whole_scores(query_HTD, key_GTD, **options)
    lse_HT = score_HTS.logsumexp(-1)
    if slot_logit_HT is not None:
        lse_HT = torch.logaddexp(lse_HT, slot_logit_HT.to(lse_HT.dtype).expand_as(lse_HT))
    return (score_HTS - lse_HT[..., None]).exp()


def whole_scores(
    query_HTD: Tensor, key_GTD: Tensor, *, hidden: float = HIDDEN, **options: Any
) -> Tensor:
    """Assemble the scores [H, T, S] of one sequence; `hidden` for invisible keys."""
    heads, tokens = query_HTD.shape[:2]
    if tokens > MAP_TOKENS:
        raise ValueError(f"attention maps of {tokens} tokens: at most {MAP_TOKENS}, they are S x S")
    dtype = torch.promote_types(query_HTD.dtype, torch.float32)
    score_HTS = torch.full((heads, tokens, tokens), hidden, dtype=dtype, device=query_HTD.device)
    score_GRTS = score_HTS.unflatten(0, (len(key_GTD), -1))
    for tile in tiles(query_HTD[None], key_GTD[None], hidden=hidden, **options):
        score_GRTS[tile.n, :, tile.rows, tile.columns] = tile.score_NRCK
    return score_HTS
