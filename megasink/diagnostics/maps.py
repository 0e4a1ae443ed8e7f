"""Attention maps of short sequences: the one S x S statistic, made on request only.

Shapes: H query heads, G key/value groups, T tokens, S = T keys, D head dim.
"""

import torch
from torch import Tensor

MAP_TOKENS = 256
"""The longest sequence whose attention maps are made."""


def attention_maps(
    query_HTD: Tensor,
    key_GTD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    prefix: int = 0,
    slot_logit_HT: Tensor | None = None,
    distance_bias_HT: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """A = softmax(scale * q k^T) of one causal layer, whole (P0.26, P1.34, P3.26, P4.2).

    Args:
        query_HTD, key_GTD: any float dtype; computed in float32, or float64 for float64.
        scale, window, prefix, distance_bias_HT, softcap: as
            `megasink.diagnostics.weights.weight_statistics`.
        slot_logit_HT: the logit of a sink or key bias. Its weight is missing from the rows, whose
            sums are then the gate (P0.2).

    Returns:
        weights [H, T, S]; 0 for keys that a row does not see.

    Raises:
        ValueError: more than `MAP_TOKENS` tokens.
    """
    heads, tokens = query_HTD.shape[:2]
    if tokens > MAP_TOKENS:
        raise ValueError(f"attention maps of {tokens} tokens: at most {MAP_TOKENS}, they are S x S")
    dtype = torch.promote_types(query_HTD.dtype, torch.float32)
    key_HSD = key_GTD.to(dtype).repeat_interleave(heads // len(key_GTD), 0)
    score_HTS = (query_HTD.to(dtype) * scale) @ key_HSD.transpose(-1, -2)
    if softcap is not None:
        score_HTS = softcap * torch.tanh(score_HTS / softcap)
    position_T = torch.arange(tokens, device=score_HTS.device)
    distance_TS = position_T[:, None] - position_T
    if distance_bias_HT is not None:
        score_HTS = score_HTS + distance_bias_HT.to(dtype)[:, distance_TS.clamp(min=0)]
    hidden_TS = (distance_TS < 0) & (position_T >= prefix)
    if window is not None:
        hidden_TS |= distance_TS >= window
    score_HTS = score_HTS.masked_fill(hidden_TS, -torch.inf)
    lse_HT = score_HTS.logsumexp(-1)
    if slot_logit_HT is not None:
        lse_HT = torch.logaddexp(lse_HT, slot_logit_HT.to(dtype).expand(heads, tokens))
    return (score_HTS - lse_HT[..., None]).exp()
