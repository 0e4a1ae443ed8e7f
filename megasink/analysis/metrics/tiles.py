"""The scores of causal attention in tiles of rows, so that statistics need nothing S x S.

Shapes: B batch, H query heads, G key/value groups, R heads per group, N = B * G, T tokens, S >= T
keys, C rows of a tile, K columns of a tile, D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 2**20
"""Elements per tile buffer; 4 MiB in float32."""

HIDDEN = -1e30  # finite, so that 0 * (z - max) is 0; its exp is 0


class Tile(NamedTuple):
    """Scores of some rows."""

    n: slice  # slice of N
    # rows, columns: slices of the T x S scores.
    rows: slice
    columns: slice
    score_NRCK: Tensor  # in the statistics dtype; may be overwritten


def tiles(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    prefix: int = 0,
    distance_bias_HT: Tensor | None = None,
    softcap: float | None = None,
    hidden: float = HIDDEN,
) -> Iterator[Tile]:
    """Yield the scores that each row sees, tile by tile, in float32 (float64 for float64).

    The queries are those of the last T tokens. A token sees `window` tokens, itself included, and
    `prefix` keys (P2.18); `hidden` is the score of others. `distance_bias_HT` is added by i - j
    (P2.20); `softcap` makes scores cap * tanh(score / cap), as in Gemma 2.
    """
    batch, heads, tokens, head_dim = query_BHTD.shape
    _, groups, keys, _ = key_BGSD.shape
    if key_BGSD.shape != (batch, groups, keys, head_dim) or heads % groups or keys < tokens:
        raise ValueError(
            f"queries {list(query_BHTD.shape)} and keys {list(key_BGSD.shape)}: batch and head dim "
            "must agree, heads be a multiple of groups, and each query have a key"
        )
    if prefix > 1 and window is not None:
        raise ValueError(f"a prefix of {prefix} does not go with a window of {window}")
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    repeats, before = heads // groups, keys - tokens
    query_NRTD = query_BHTD.reshape(batch * groups, repeats, tokens, head_dim)
    key_NSD = key_BGSD.reshape(batch * groups, keys, head_dim)
    count = max(1, min(tokens, 128, SIZE // (repeats * keys)))
    together = max(1, SIZE // (repeats * count * keys))
    for start in range(0, batch * groups, together):
        n = slice(start, min(start + together, batch * groups))
        some = key_NSD[n].to(dtype)
        for top in range(0, tokens, count):
            rows = slice(top, min(top + count, tokens))
            places = slice(before + rows.start, before + rows.stop)
            left = 0 if window is None else max(0, places.start - window + 1)
            columns = slice(left, max(places.stop, min(prefix, keys)))
            score_NRCK = _scores(query_NRTD[n, :, rows], some[:, columns], scale, softcap)
            if distance_bias_HT is not None:
                bias_GRT = distance_bias_HT.unflatten(0, (groups, -1)).to(dtype)
                score_NRCK += _bias(bias_GRT, n, places, columns)
            _hide(score_NRCK, places, columns, window, prefix, hidden)
            yield Tile(n, rows, columns, score_NRCK)


def _scores(query_NRCD: Tensor, key_NKD: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Compute z of one tile."""
    count, repeats, rows, head_dim = query_NRCD.shape
    query = (query_NRCD.to(key_NKD.dtype) * scale).reshape(count, repeats * rows, head_dim)
    score = torch.bmm(query, key_NKD.transpose(1, 2)).view(count, repeats, rows, -1)
    return score if softcap is None else score.div_(softcap).tanh_().mul_(softcap)


def _hide(
    score_NRCK: Tensor, rows: slice, columns: slice, window: int | None, prefix: int, hidden: float
) -> None:
    """Overwrite hidden keys; only columns from the tile's first row on can be future keys."""
    device, left = score_NRCK.device, columns.start
    row_C1 = torch.arange(rows.start, rows.stop, device=device)[:, None]
    first = max(rows.start, left)
    future_K = torch.arange(first, columns.stop, device=device)
    hidden_CK = (future_K > row_C1) & (future_K >= prefix)
    score_NRCK[..., first - left :].masked_fill_(hidden_CK, hidden)
    if window is not None and left <= rows.stop - 1 - window:
        past_K = torch.arange(left, min(rows.stop - window, columns.stop), device=device)
        score_NRCK[..., : len(past_K)].masked_fill_(past_K <= row_C1 - window, hidden)


def _bias(bias_GRT: Tensor, n: slice, rows: slice, columns: slice) -> Tensor:
    """Return [N, R, C, K]: the bias of each distance; future keys, hidden later, get 0's."""
    device = bias_GRT.device
    row_C1 = torch.arange(rows.start, rows.stop, device=device)[:, None]
    column_K = torch.arange(columns.start, columns.stop, device=device)
    distance_CK = (row_C1 - column_K).clamp_(min=0)
    group_N = torch.arange(n.start, n.stop, device=device) % len(bias_GRT)
    return bias_GRT[:, :, distance_CK][group_N]
