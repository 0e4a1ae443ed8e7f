"""Attention over packed documents, each attending only to itself.

Attention runs per document, so it is exact for every variant, gate and mask on every backend.
Documents of the same size share a call.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys of the pack, D head dim. The
last query is aligned with the last key.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megasink.attention.call import AttentionOutput


def document_lengths(cu_seqlens: Sequence[int], tokens: int) -> list[int]:
    """Return the lengths of the non-empty documents, from boundaries on the host."""
    bounds = [int(bound) for bound in cu_seqlens]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[:1] != [0] or bounds[-1] != tokens or min(lengths, default=-1) < 0:
        shown = bounds if len(bounds) < 9 else [*bounds[:4], "...", *bounds[-4:]]
        raise ValueError(f"cu_seqlens must grow from 0 to the {tokens} tokens, got {shown}")
    return [length for length in lengths if length]


def document_starts(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """Return the first token of each token's document, [S] int64.

    The host does not wait for the device, and the layers of a microbatch share the tensor.
    """
    return _starts(tuple(cu_seqlens), device)


@functools.lru_cache(maxsize=4)
def _starts(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = torch.tensor(cu_seqlens, pin_memory=device.type == "cuda")
    bounds = bounds.to(device, non_blocking=True)
    return bounds[:-1].repeat_interleave(bounds.diff(), output_size=cu_seqlens[-1])


def attend_by_document(
    attend: Callable[..., AttentionOutput],
    cu_seqlens: Sequence[int],
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *others: Tensor | None,
) -> AttentionOutput:
    """Call `attend` on each document that has queries, or on a batch of those of equal size.

    With fewer queries than keys the first of these documents may begin before the queries: its
    queries are then fewer than its keys. `others` broadcast to [B, H, T] or [B, H, T, D]; without a
    dimension of batch or tokens they are the same for each document. The results are in token
    order; the memory layout of out_BHTD is [T, B, H, D].
    """
    sizes = _sizes(cu_seqlens, query_BHTD.shape[2], key_BGSD.shape[2])
    queries, keys = zip(*sizes, strict=True)
    hidden = key_BGSD.shape[2] - sum(keys)
    # Use split, not slices: its backward is one concatenation, while each slice's backward
    # allocates a tensor of the size of the pack.
    by_key = [hidden, *keys] if hidden else list(keys)

    def of_queries(tensor: Tensor | None) -> Sequence[Tensor | None]:
        if tensor is None or tensor.shape[0] == tensor.shape[2] == 1:
            return [tensor] * len(sizes)
        return tensor.expand(query_BHTD.shape[: tensor.dim()]).split(queries, 2)

    split = (
        query_BHTD.split(queries, 2),
        *(tensor.split(by_key, 2)[-len(keys) :] for tensor in (key_BGSD, value_BGSD)),
        *map(of_queries, others),
    )
    parts = list(zip(*split, strict=True))
    by_size: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, size in enumerate(sizes):
        by_size[size].append(index)
    results: dict[int, tuple[Tensor | None, ...]] = {}
    for members in by_size.values():
        if len(members) == 1:
            results[members[0]] = attend(*parts[members[0]])
            continue
        alike = zip(*(parts[member] for member in members), strict=True)
        batched = attend(*(same[0] if same[0] is same[1] else torch.cat(same) for same in alike))
        pieces = [[None] * len(members) if t is None else t.chunk(len(members)) for t in batched]
        results |= dict(zip(members, zip(*pieces, strict=True), strict=True))
    ordered = [results[index] for index in range(len(sizes))]
    out_TBHD = torch.cat([out.permute(2, 0, 1, 3) for out, _, _ in ordered if out is not None])
    lse_BHT = torch.cat([lse for _, lse, _ in ordered if lse is not None], 2)
    gates_BHT = [gate for _, _, gate in ordered if gate is not None]
    gate_BHT = torch.cat(gates_BHT, 2) if gates_BHT else None
    return AttentionOutput(out_TBHD.permute(1, 2, 0, 3), lse_BHT, gate_BHT)


def _sizes(cu_seqlens: Sequence[int], queries: int, keys: int) -> list[tuple[int, int]]:
    """Return (queries, keys) of each document that has queries."""
    sizes, start, past = [], 0, keys - queries
    for length in document_lengths(cu_seqlens, keys):
        stop = start + length
        if stop > past:
            sizes.append((stop - max(start, past), length))
        start = stop
    return sizes
