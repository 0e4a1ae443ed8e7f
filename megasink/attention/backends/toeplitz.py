"""Causal attention with a bias by distance, in plain tensor operations, a chunk of rows at a time.

z_ij = scale * q_i . k_j + b(i - j): along a diagonal the bias is one number per head. So a chunk
of rows needs C + K - 1 of them, seen as a C x K matrix through overlapping strides, and their
gradient is the sum of dS along the diagonals. Hidden keys are biases of -inf: distances below 0,
and from the window on. The largest temporary is [B, H, CHUNK, K]. fp16 and bf16 are computed in
float32.

Shapes: B batch, H query heads, G groups, R heads per group, T queries, C a chunk of them, S keys,
K those that the chunk sees, D head dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 256


class _Chunk(NamedTuple):
    """Some rows, the keys that one of them sees, and the diagonals that they touch.

    Attributes:
        diagonals: slice of the reversed bias of `_reversed_bias`, C + K - 1 entries.
    """

    rows: slice
    keys: slice
    diagonals: slice


def forward_toeplitz(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    distance_bias_HS: Tensor,
    *,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """See `Backend.forward_biased`."""
    query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
    bias_GRX = _reversed_bias(distance_bias_HS, key_BGSD.shape[1], window)
    out_BGRTD = torch.empty_like(query_BGRTD)
    lse_BGRT = query_BGRTD.new_empty(query_BGRTD.shape[:-1])
    for chunk in _chunks(query_BHTD.shape[2], key_BGSD.shape[2], window):
        scores_BGRCK = _scores(query_BGRTD, key_BG1SD, bias_GRX, chunk, scale)
        lse_BGRC = scores_BGRCK.logsumexp(-1)
        lse_BGRT[..., chunk.rows] = lse_BGRC
        weights_BGRCK = scores_BGRCK.sub_(lse_BGRC[..., None]).exp_()
        out_BGRTD[..., chunk.rows, :] = weights_BGRCK @ value_BG1SD[..., chunk.keys, :]
    return out_BGRTD.flatten(1, 2).to(query_BHTD.dtype), lse_BGRT.flatten(1, 2)


def backward_toeplitz(
    grad_out_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    distance_bias_HS: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    scale: float,
    window: int | None,
    lse_grad_BHT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `Backend.backward_biased`."""
    query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
    groups = key_BGSD.shape[1]
    bias_GRX = _reversed_bias(distance_bias_HS, groups, window)
    grad_out_BGRTD = grad_out_BHTD.to(query_BGRTD.dtype).unflatten(1, (groups, -1))
    delta_BHT = (grad_out_BHTD.to(query_BGRTD.dtype) * out_BHTD).sum(-1)
    if lse_grad_BHT is not None:
        delta_BHT = delta_BHT - lse_grad_BHT
    delta_BGRT = delta_BHT.unflatten(1, (groups, -1))
    lse_BGRT = lse_BHT.unflatten(1, (groups, -1))

    grad_query_BGRTD = torch.empty_like(query_BGRTD)
    grad_key_BGSD = torch.zeros_like(key_BG1SD.squeeze(2))
    grad_value_BGSD = torch.zeros_like(grad_key_BGSD)
    grad_bias_GRX = torch.zeros_like(bias_GRX)
    for chunk in _chunks(query_BHTD.shape[2], key_BGSD.shape[2], window):
        rows, keys = chunk.rows, chunk.keys
        scores_BGRCK = _scores(query_BGRTD, key_BG1SD, bias_GRX, chunk, scale)
        weights_BGRCK = scores_BGRCK.sub_(lse_BGRT[..., rows, None]).exp_()
        grad_out_BGRCD = grad_out_BGRTD[..., rows, :]
        grad_scores_BGRCK = grad_out_BGRCD @ value_BG1SD[..., keys, :].transpose(-1, -2)
        grad_scores_BGRCK.sub_(delta_BGRT[..., rows, None]).mul_(weights_BGRCK)
        grad_bias_GRX[..., chunk.diagonals] += _diagonal_sums(grad_scores_BGRCK.sum(0))
        grad_scores_BGRCK.mul_(scale)
        grad_query_BGRTD[..., rows, :] = grad_scores_BGRCK @ key_BG1SD[..., keys, :]
        grad_key_BGSD[..., keys, :] += _over_group(grad_scores_BGRCK, query_BGRTD[..., rows, :])
        grad_value_BGSD[..., keys, :] += _over_group(weights_BGRCK, grad_out_BGRCD)
    dtype = query_BHTD.dtype
    return (
        grad_query_BGRTD.flatten(1, 2).to(dtype),
        grad_key_BGSD.to(dtype),
        grad_value_BGSD.to(dtype),
        grad_bias_GRX.flatten(0, 1)[:, : key_BGSD.shape[2]].flip(-1).to(distance_bias_HS.dtype),
    )


def _grouped(query_BHTD: Tensor, *keys_BGSD: Tensor) -> tuple[Tensor, ...]:
    """Query as [B, G, R, T, D] and keys as [B, G, 1, S, D], float32 at least."""
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    query_BGRTD = query_BHTD.to(dtype).unflatten(1, (keys_BGSD[0].shape[1], -1))
    return query_BGRTD, *(tensor.to(dtype).unsqueeze(2) for tensor in keys_BGSD)


def _reversed_bias(distance_bias_HS: Tensor, groups: int, window: int | None) -> Tensor:
    """[G, R, S + CHUNK - 1] biases of the distances S - 1, .., 0, -1, .., those hidden -inf."""
    bias_HS = distance_bias_HS
    if window is not None and window < bias_HS.shape[1]:
        bias_HS = pad(bias_HS[:, :window], (0, bias_HS.shape[1] - window), value=-torch.inf)
    reversed_HX = pad(bias_HS.flip(-1), (0, CHUNK - 1), value=-torch.inf)
    return reversed_HX.unflatten(0, (groups, -1))


def _chunks(queries: int, keys: int, window: int | None) -> Iterator[_Chunk]:
    past = keys - queries  # the last query stands at the last key
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        first = 0 if window is None else max(past + start - window + 1, 0)
        largest = past + stop - 1 - first  # distance
        diagonals = slice(keys - 1 - largest, keys - 1 + stop - start)
        yield _Chunk(slice(start, stop), slice(first, past + stop), diagonals)


def _scores(
    query_BGRTD: Tensor, key_BG1SD: Tensor, bias_GRX: Tensor, chunk: _Chunk, scale: float
) -> Tensor:
    keys_BG1KD = key_BG1SD[..., chunk.keys, :]
    scores_BGRCK = query_BGRTD[..., chunk.rows, :] @ keys_BG1KD.transpose(-1, -2)
    # Window r of K neighbours is the bias of the r-th row from below.
    bias_GRCK = bias_GRX[..., chunk.diagonals].unfold(-1, keys_BG1KD.shape[-2], 1).flip(-2)
    return scores_BGRCK.mul_(scale).add_(bias_GRCK)


def _diagonal_sums(matrix_GRCK: Tensor) -> Tensor:
    """The transpose of what `_scores` does with the bias: [G, R, C + K - 1]."""
    rows, columns = matrix_GRCK.shape[-2:]
    # Read with one column less, rows of C + K columns shift by one from each row to the next.
    padded = pad(matrix_GRCK.flip(-2), (0, rows)).flatten(-2)
    return padded[..., : rows * (rows + columns - 1)].unflatten(-1, (rows, -1)).sum(-2)


def _over_group(weights_BGRCK: Tensor, rows_BGRCD: Tensor) -> Tensor:
    """sum over heads of the group and rows of weights_ck * row_cd, as [B, G, K, D]."""
    return weights_BGRCK.flatten(2, 3).transpose(-1, -2) @ rows_BGRCD.flatten(2, 3)
