"""Helpers for attention in plain tensor operations, chunked over query rows.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, C queries of a
chunk, S keys, K keys visible to the chunk, D head dim.
"""

from collections.abc import Iterator

from torch import Tensor

from megasink.attention.layout import statistics_dtype

CHUNK = 256


def grouped(query_BHTD: Tensor, *keys_BGSD: Tensor) -> tuple[Tensor, ...]:
    """Return query as [B, G, R, T, D] and keys as [B, G, 1, S, D], in the statistics dtype."""
    dtype = statistics_dtype(query_BHTD.dtype)
    query_BGRTD = query_BHTD.to(dtype).unflatten(1, (keys_BGSD[0].shape[1], -1))
    return query_BGRTD, *(tensor.to(dtype).unsqueeze(2) for tensor in keys_BGSD)


def row_chunks(
    queries: int, keys: int, causal: bool, window: int | None
) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and of their visible keys; the last query is at the last key."""
    past = keys - queries
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        first = 0 if window is None or not causal else max(past + start - window + 1, 0)
        yield slice(start, stop), slice(first, past + stop if causal else keys)


def products(query_BGRTD: Tensor, key_BG1SD: Tensor, rows: slice, keys: slice) -> Tensor:
    """Return q_i . k_j, [B, G, R, C, K]."""
    return query_BGRTD[..., rows, :] @ key_BG1SD[..., keys, :].transpose(-1, -2)


def sum_over_group(weights_BGRCK: Tensor, rows_BGRCD: Tensor) -> Tensor:
    """Sum weight_ck * row_cd over rows and the heads of the group: [B, G, K, D]."""
    return weights_BGRCK.flatten(2, 3).transpose(-1, -2) @ rows_BGRCD.flatten(2, 3)
