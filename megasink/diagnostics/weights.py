"""Statistics of attention weights, streamed: tiles of rows, nothing S x S.

The scores of a tile of rows are computed once; first-token weights, gates, entropies, sums of
squares and column sums are all read off them. That is one matrix product where the same numbers
from kernel calls (a forward with other values for the entropy, a backward for the column sums, a
forward at twice the scale for the squares) are nine, and it has none of the cancellation of the
first. It holds with windows, prefixes, biases and soft caps too, and leaves the model's own kernel
alone.

Shapes: B batch, H query heads, G key/value groups, R heads per group, N = B * G, T tokens, C rows
of a tile, K columns of a tile, D head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 2**20
"""Elements of one buffer of a tile; there are two, in float32 4 MiB each."""

_HIDDEN = -1e30  # finite: 0 * (z - max) must be 0, and exp of it is


class WeightStatistics(NamedTuple):
    """What :func:`weight_statistics` returns; all in the statistics dtype but the column sums.

    Attributes:
        lse_BHT: log of the sum of exp over the visible keys, without the slot; nats.
        first_weight_BHT: A_i0, 0 where a window hides key 0.
        slot_weight_BHT: the weight of the slot, 0 without one.
        gate_BHT: 1 - slot weight, or without a slot 1 - A_i0; by sums, not by subtraction, so that
            a gate of 1e-20 is not rounded to 0. Row 0 without a slot is exactly 0.
        entropy_BHT: of keys and slot as outcomes; nats.
        square_BHT: sum over the keys of A_ij ** 2.
        column_sum_BHT: float64: for key j the sum over the queries i >= j of A_ij.
    """

    lse_BHT: Tensor
    first_weight_BHT: Tensor
    slot_weight_BHT: Tensor
    gate_BHT: Tensor
    entropy_BHT: Tensor
    square_BHT: Tensor
    column_sum_BHT: Tensor


@torch.no_grad()
def weight_statistics(
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    prefix: int = 0,
    slot_logit_BHT: Tensor | None = None,
    distance_bias_HT: Tensor | None = None,
    softcap: float | None = None,
) -> WeightStatistics:
    """Statistics of A = softmax(scale * q k^T) of causal attention, without A.

    Args:
        query_BHTD, key_BGTD: any float dtype; computed in float32, or float64 for float64.
        scale: factor of the scores.
        window: tokens visible to a token, itself included; None for all.
        prefix: keys that every token sees (P2.18).
        slot_logit_BHT: broadcastable; the logit of one more key, such as a sink (P0.2).
        distance_bias_HT: entry [h, i - j] is added to the score of key j <= i (P2.20).
        softcap: scores are cap * tanh(score / cap), as Gemma 2 has them.

    Returns:
        see `WeightStatistics`. Work O(T^2 D), memory O(T) and two tiles.

    Raises:
        ValueError: shapes that do not fit together, or a prefix with a window.
    """
    batch, heads, tokens, head_dim = query_BHTD.shape
    groups = key_BGTD.shape[1]
    if key_BGTD.shape != (batch, groups, tokens, head_dim) or heads % groups:
        raise ValueError(
            f"queries {list(query_BHTD.shape)} and keys {list(key_BGTD.shape)}: batch, tokens and "
            "head dim must agree, and heads be a multiple of groups"
        )
    if prefix > 1 and window is not None:
        raise ValueError(f"a prefix of {prefix} does not go with a window of {window}")
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    repeats, device = heads // groups, query_BHTD.device
    query_NRTD = query_BHTD.reshape(batch * groups, repeats, tokens, head_dim)
    key_NTD = key_BGTD.reshape(batch * groups, tokens, head_dim)
    slot_NRT = None
    if slot_logit_BHT is not None:
        slot_BHT = slot_logit_BHT.to(dtype).expand(batch, heads, tokens)
        slot_NRT = slot_BHT.reshape(batch * groups, repeats, tokens)

    shape = (batch * groups, repeats, tokens)
    lse, first, slot, gate, entropy, square = (
        torch.zeros(shape, dtype=dtype, device=device) for _ in range(6)
    )
    column_sum = torch.zeros(shape, dtype=torch.float64, device=device)
    rows = max(1, min(tokens, 128, TILE // (repeats * tokens)))
    together = max(1, TILE // (repeats * rows * tokens))
    for start in range(0, batch * groups, together):
        n = slice(start, min(start + together, batch * groups))
        keys = key_NTD[n].to(dtype)
        for top in range(0, tokens, rows):
            stop = min(top + rows, tokens)
            left = 0 if window is None else max(0, top - window + 1)
            right = max(stop, min(prefix, tokens))
            r = slice(top, stop)
            score_NRCK = _scores(query_NRTD[n, :, r], keys[:, left:right], scale, softcap)
            if distance_bias_HT is not None:
                score_NRCK += _bias_of_tile(
                    distance_bias_HT, groups, n, top, stop, left, right, dtype
                )
            _hide(score_NRCK, top, stop, left, right, window, prefix)
            # Softmax by hand: every statistic is a reduction of these two buffers.
            highest_NRC = score_NRCK.amax(-1)
            logit_NRC = None
            if slot_NRT is not None:
                logit_NRC = slot_NRT[n, :, r]
                highest_NRC = torch.maximum(highest_NRC, logit_NRC)
            score_NRCK -= highest_NRC[..., None]
            weight_NRCK = score_NRCK.exp()
            first_NRC = weight_NRCK[..., 0].clone() if left == 0 else torch.zeros_like(highest_NRC)
            others_NRC = weight_NRCK[..., 1:].sum(-1) if left == 0 else weight_NRCK.sum(-1)
            real_NRC = first_NRC + others_NRC
            total_NRC, open_NRC = real_NRC, others_NRC
            if logit_NRC is not None:
                slot_NRC = (logit_NRC - highest_NRC).exp()
                total_NRC, open_NRC = real_NRC + slot_NRC, real_NRC
                slot[n, :, r] = slot_NRC / total_NRC
            lse[n, :, r] = real_NRC.log() + highest_NRC
            first[n, :, r] = first_NRC / total_NRC
            gate[n, :, r] = open_NRC / total_NRC
            past_NRCK = weight_NRCK
            if prefix > top:
                future_CK = torch.ones(stop - top, right - left, dtype=torch.bool, device=device)
                past_NRCK = weight_NRCK.masked_fill(future_CK.triu(top - left + 1), 0.0)
            of_rows_NR1C = (1.0 / total_NRC)[..., None, :]
            column_sum[n, :, left:right] += (of_rows_NR1C @ past_NRCK).squeeze(-2)
            mean_score_NRC = score_NRCK.mul_(weight_NRCK).sum(-1)
            if logit_NRC is not None:
                mean_score_NRC += slot_NRC * (logit_NRC - highest_NRC)
            entropy[n, :, r] = total_NRC.log() - mean_score_NRC / total_NRC
            square[n, :, r] = weight_NRCK.square_().sum(-1) / total_NRC.square()
    return WeightStatistics(
        *(
            x.reshape(batch, heads, tokens)
            for x in (lse, first, slot, gate, entropy.clamp_(min=0.0), square, column_sum)
        )
    )


def _scores(query_NRCD: Tensor, key_NKD: Tensor, scale: float, softcap: float | None) -> Tensor:
    """z of one tile."""
    count, repeats, rows, head_dim = query_NRCD.shape
    query = (query_NRCD.to(key_NKD.dtype) * scale).reshape(count, repeats * rows, head_dim)
    score = torch.bmm(query, key_NKD.transpose(1, 2)).view(count, repeats, rows, -1)
    return score if softcap is None else score.div_(softcap).tanh_().mul_(softcap)


def _hide(
    score_NRCK: Tensor,
    top: int,
    stop: int,
    left: int,
    right: int,
    window: int | None,
    prefix: int,
) -> None:
    """Write what a row does not see. Only the columns from `top` on can lie in its future."""
    device = score_NRCK.device
    row_C1 = torch.arange(top, stop, device=device)[:, None]
    future_K = torch.arange(max(top, left), right, device=device)
    hidden_CK = (future_K > row_C1) & (future_K >= prefix)
    score_NRCK[..., max(top, left) - left :].masked_fill_(hidden_CK, _HIDDEN)
    if window is not None and left <= stop - 1 - window:
        past_K = torch.arange(left, min(stop - window, right), device=device)
        score_NRCK[..., : len(past_K)].masked_fill_(past_K <= row_C1 - window, _HIDDEN)


def _bias_of_tile(
    distance_bias_HT: Tensor,
    groups: int,
    n: slice,
    top: int,
    stop: int,
    left: int,
    right: int,
    dtype: torch.dtype,
) -> Tensor:
    """[N, R, C, K]: the bias of each distance; future keys, hidden later, get that of 0."""
    device = distance_bias_HT.device
    row_C1 = torch.arange(top, stop, device=device)[:, None]
    distance_CK = (row_C1 - torch.arange(left, right, device=device)).clamp_(min=0)
    bias_GRT = distance_bias_HT.unflatten(0, (groups, -1)).to(dtype)
    group_N = torch.arange(n.start, n.stop, device=device) % groups
    return bias_GRT[:, :, distance_CK][group_N]
