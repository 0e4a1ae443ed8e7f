"""Streamed statistics of attention weights: tiles of rows, and nothing of size S x S.

The scores of a tile of rows are computed once, and give first-token weights, gates, entropies, sums
of squares and column sums: one matrix product, where calls of the kernel would take nine, with
cancellation in the entropy.

Non-softmax similarities have proxy weights (P2.37): A_ij = |w_ij| / (sum_j |w_ij| + 1e-8). A row
whose weights are all 0 (a dead ReLU) attends to nothing. Attention maps of short sequences are the
only S x S statistic, computed only on request.

Shapes: B batch, H query heads, G key/value groups, R heads per group, N = B * G, T tokens, C rows
of a tile, K columns of a tile, D head dim, S >= T keys.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.attention.constants import MAP_TOKENS, PROXY_EPSILON

SIZE = 2**20
"""Elements per tile buffer (4 MiB in float32)."""

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
    """Yield the scores of the last T tokens, tile by tile, in float32 (float64 for float64).

    A token sees `window` tokens, itself included, and `prefix` keys (P2.18); others score `hidden`.
    """
    batch, heads, tokens, head_dim = query_BHTD.shape
    _, groups, keys, _ = key_BGSD.shape
    if key_BGSD.shape != (batch, groups, keys, head_dim) or heads % groups or keys < tokens:
        raise ValueError(
            f"queries {list(query_BHTD.shape)} and keys {list(key_BGSD.shape)}: batch and head dim "
            "must agree, heads must be a multiple of groups, and each query must have a key"
        )
    if prefix > 1 and window is not None:
        raise ValueError(f"prefix {prefix} and window {window} cannot be combined: drop one")
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


class WeightStatistics(NamedTuple):
    """Return value of `weight_statistics`; all but the column sums in the statistics dtype."""

    first_weight_BHT: Tensor  # A_i0; 0 if a window hides key 0
    slot_weight_BHT: Tensor  # weight of the slot; 0 without one
    # 1 - slot weight, or 1 - A_i0 without a slot; summed, not subtracted, so that a gate of 1e-20
    # is not rounded to 0. Row 0 without a slot is exactly 0.
    gate_BHT: Tensor
    entropy_BHT: Tensor  # entropy over keys and slot; nats
    square_BHT: Tensor  # sum over the keys of A_ij ** 2
    column_sum_BHT: Tensor  # float64; for key j the sum of A_ij over the queries i >= j

    @classmethod
    def room_for(cls, query_BHTD: Tensor, key_BGTD: Tensor) -> "WeightStatistics":
        """Return zeros, [N, R, T] each."""
        (batch, heads, tokens, _), (_, groups, keys, _) = query_BHTD.shape, key_BGTD.shape
        dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
        kinds = [*[(tokens, dtype)] * 5, (keys, torch.float64)]
        shape = (batch * groups, heads // groups)
        return cls(*(query_BHTD.new_zeros((*shape, n), dtype=kind) for n, kind in kinds))

    def by_head(self, batch: int) -> "WeightStatistics":
        """Reshape [N, R, T] to [B, H, T]."""
        return type(self)(*(x.reshape(batch, -1, x.shape[-1]) for x in self))


@torch.no_grad()
def weight_statistics(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    *,
    prefix: int = 0,
    slot_logit_BHT: Tensor | None = None,
    **options: Any,
) -> WeightStatistics:
    """Compute statistics of A = softmax(scale * q k^T) without A: O(T^2 D) work, O(T) memory."""
    batch, heads, tokens, _ = query_BHTD.shape
    statistics = WeightStatistics.room_for(query_BHTD, key_BGTD)
    first, slot, gate, entropy, square, column_sum = statistics
    slot_NRT = None
    if slot_logit_BHT is not None:
        slot_NRT = slot_logit_BHT.to(first.dtype).expand(batch, heads, tokens).reshape(first.shape)
    for n, rows, columns, score_NRCK in tiles(query_BHTD, key_BGTD, prefix=prefix, **options):
        # Explicit softmax: every statistic is a reduction of these two buffers.
        highest_NRC = score_NRCK.amax(-1)
        logit_NRC = None
        if slot_NRT is not None:
            logit_NRC = slot_NRT[n, :, rows]
            highest_NRC = torch.maximum(highest_NRC, logit_NRC)
        score_NRCK -= highest_NRC[..., None]
        weight_NRCK = score_NRCK.exp()
        first_NRC, others_NRC = first_and_others(weight_NRCK, columns)
        real_NRC = first_NRC + others_NRC
        total_NRC, open_NRC = real_NRC, others_NRC
        if logit_NRC is not None:
            slot_NRC = (logit_NRC - highest_NRC).exp()
            total_NRC, open_NRC = real_NRC + slot_NRC, real_NRC
            slot[n, :, rows] = slot_NRC / total_NRC
        first[n, :, rows] = first_NRC / total_NRC
        gate[n, :, rows] = open_NRC / total_NRC
        past_NRCK = weight_NRCK
        if prefix > rows.start:
            future_CK = torch.ones(weight_NRCK.shape[2:], dtype=torch.bool, device=first.device)
            future_CK = future_CK.triu(rows.start - columns.start + 1)
            past_NRCK = weight_NRCK.masked_fill(future_CK, 0.0)
        column_sum[n, :, columns] += column_sums(past_NRCK, total_NRC)
        mean_score_NRC = score_NRCK.mul_(weight_NRCK).sum(-1)
        if logit_NRC is not None:
            mean_score_NRC += slot_NRC * (logit_NRC - highest_NRC)
        entropy[n, :, rows] = (total_NRC.log() - mean_score_NRC / total_NRC).clamp_(min=0.0)
        square[n, :, rows] = weight_NRCK.square_().sum(-1) / total_NRC.square()
    return statistics.by_head(batch)


@torch.no_grad()
def first_weights(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    *,
    prefix: int = 0,
    slot_logit_BHT: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return A_i0 alone, [B, H, T], as in `weight_statistics` and at a fraction of its cost."""
    batch, heads, tokens, _ = query_BHTD.shape
    groups = key_BGTD.shape[1]
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    first = query_BHTD.new_zeros((batch * groups, heads // groups, tokens), dtype=dtype)
    slot_NRT = None
    if slot_logit_BHT is not None:
        slot_NRT = slot_logit_BHT.to(dtype).expand(batch, heads, tokens).reshape(first.shape)
    for n, rows, columns, score_NRCK in tiles(query_BHTD, key_BGTD, prefix=prefix, **options):
        if columns.start > 0:
            continue  # a window hides key 0
        highest_NRC = score_NRCK.amax(-1)
        if slot_NRT is not None:
            highest_NRC = torch.maximum(highest_NRC, slot_NRT[n, :, rows])
        weight_NRCK = score_NRCK.sub_(highest_NRC[..., None]).exp_()
        first_NRC = weight_NRCK[..., 0].clone()
        total_NRC = weight_NRCK.sum(-1)
        if slot_NRT is not None:
            total_NRC += (slot_NRT[n, :, rows] - highest_NRC).exp()
        first[n, :, rows] = first_NRC / total_NRC
    return first.reshape(batch, heads, tokens)


def first_and_others(weight_NRCK: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return [N, R, C] twice: the weight of key 0, and the sum over the other keys of the tile."""
    if columns.start > 0:
        return torch.zeros_like(weight_NRCK[..., 0]), weight_NRCK.sum(-1)
    return weight_NRCK[..., 0].clone(), weight_NRCK[..., 1:].sum(-1)


def column_sums(weight_NRCK: Tensor, total_NRC: Tensor) -> Tensor:
    """Return [N, R, K]: the sum over a tile's rows of weight / total."""
    return ((1.0 / total_NRC)[..., None, :] @ weight_NRCK).squeeze(-2)


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
        raise ValueError(f"attention maps of {tokens} tokens: use at most {MAP_TOKENS} tokens")
    dtype = torch.promote_types(query_HTD.dtype, torch.float32)
    score_HTS = torch.full((heads, tokens, tokens), hidden, dtype=dtype, device=query_HTD.device)
    score_GRTS = score_HTS.unflatten(0, (len(key_GTD), -1))
    for tile in tiles(query_HTD[None], key_GTD[None], hidden=hidden, **options):
        score_GRTS[tile.n, :, tile.rows, tile.columns] = tile.score_NRCK
    return score_HTS


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
    """Compute statistics of the proxy weights of queries and keys, after any feature map."""
    if similarity not in _WEIGHTS:
        raise ValueError(f"unknown similarity {similarity!r}: choose {', '.join(SIMILARITIES)}")
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
