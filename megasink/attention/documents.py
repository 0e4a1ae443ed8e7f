"""Attention over packed documents, each attending only to itself.

A kernel that `packs` takes all documents in one call. Otherwise attention runs per document, which
is exact for every variant, gate and mask on every backend; documents of the same size share a call.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys of the pack, D head dim, N
documents. The last query is aligned with the last key.
"""

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, AttentionOutput, Slotted
from megasink.attention.layout import statistics_dtype


def document_lengths(cu_seqlens: Sequence[int], tokens: int) -> list[int]:
    """Return the lengths of the non-empty documents, from boundaries on the host."""
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = cu_seqlens.tolist()
    try:
        bounds = [operator.index(bound) for bound in cu_seqlens]
    except TypeError:
        raise ValueError(f"cu_seqlens must be integers, got {cu_seqlens!r:.80}") from None
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[:1] != [0] or bounds[-1] != tokens or min(lengths, default=-1) < 0:
        shown = bounds if len(bounds) < 9 else [*bounds[:4], "...", *bounds[-4:]]
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens} (tokens), got {shown}")
    return [length for length in lengths if length]


CACHES: list[Any] = []  # of tensors that the layers share, for those who must start without them


def _remembered[*Ts, R](
    function: Callable[[Sequence[int], *Ts], R],
) -> Callable[[Sequence[int], *Ts], R]:
    """Cache a function of boundaries, which may be a list: the layers share its tensors."""
    cached = functools.lru_cache(maxsize=8)(function)
    CACHES.append(cached)

    @functools.wraps(function)
    def remembered(cu_seqlens: Sequence[int], *args: *Ts) -> R:
        return cached(tuple(cu_seqlens), *args)

    return remembered


@_remembered
def document_starts(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """Return the first token of each token's document, [S] int64.

    The host does not wait for the device, and the layers of a microbatch share the tensor.
    """
    bounds = _on_device(cu_seqlens, device)
    return bounds[:-1].repeat_interleave(bounds.diff(), output_size=cu_seqlens[-1])


def _on_device(values: Sequence[object], device: torch.device, dtype: Any = None) -> Tensor:
    pins = device.type == "cuda" and torch.cuda.is_available()
    pinned = torch.tensor(values, dtype=dtype, pin_memory=pins)
    return pinned.to(device, non_blocking=True)


class Ends(NamedTuple):
    """The boundaries of packed documents for a kernel, by the names of FlashAttention."""

    cu_seqlens_q: Tensor  # [N + 1] int32
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@_remembered
def ends(cu_seqlens: Sequence[int], queries: int, device: torch.device) -> Ends:
    """Return the boundaries of documents that all have queries."""
    of_queries = [max(bound - (cu_seqlens[-1] - queries), 0) for bound in cu_seqlens]
    longest = (max(b - a for a, b in pairwise(bounds)) for bounds in (of_queries, cu_seqlens))
    # Rows of whole 16 bytes, where cuDNN expects the beginning of a tensor.
    rest = (0,) * (-len(cu_seqlens) % 4)
    both = _on_device(((*of_queries, *rest), (*cu_seqlens, *rest)), device, torch.int32)
    queries_N, keys_N = both[:, : len(cu_seqlens)]
    return Ends(queries_N, keys_N, *longest)


class FirstKeys(NamedTuple):
    """The first key of each document, and for each query its document, first key and position."""

    starts_N: Tensor
    document_T: Tensor
    start_T: Tensor
    position_T: Tensor


@_remembered
def first_keys(cu_seqlens: Sequence[int], queries: int, device: torch.device) -> FirstKeys:
    """Return the places of first keys and queries, int64."""
    bounds, keys = _on_device(cu_seqlens, device), cu_seqlens[-1]
    number_N = torch.arange(len(cu_seqlens) - 1, device=device)
    document_T = number_N.repeat_interleave(bounds.diff(), output_size=keys)[keys - queries :]
    start_T = bounds[document_T]
    position_T = torch.arange(keys - queries, keys, device=device) - start_T
    return FirstKeys(bounds[:-1], document_T, start_T, position_T)


def fill_first_rows(
    grad_BGSD: Tensor, weight_BHT: Tensor, rows_BHTD: Tensor, cu_seqlens: Sequence[int]
) -> None:
    """Write each document's sum of weight * row, over queries and heads, into its first row."""
    places = first_keys(cu_seqlens, rows_BHTD.shape[2], rows_BHTD.device)
    groups, starts_N = grad_BGSD.shape[1], places.starts_N
    terms_BGTD = (weight_BHT[..., None] * rows_BHTD).unflatten(1, (groups, -1)).sum(2)
    sums_BGND = terms_BGTD.new_zeros(*terms_BGTD.shape[:2], len(starts_N), terms_BGTD.shape[3])
    sums_BGND.index_add_(2, places.document_T, terms_BGTD)
    grad_BGSD.index_copy_(2, starts_N, sums_BGND.to(grad_BGSD.dtype))


class Tables(NamedTuple):
    """Which program of a launch has which rows, int32: no program has rows of two documents."""

    programs: Tensor  # (first row, end, first key) of each
    documents: Tensor  # (first program, end, first key) of each


@_remembered
def tables_of(cu_seqlens: Sequence[int], queries: int, rows: int, device: torch.device) -> Tables:
    """Return the tables for programs of this many rows."""
    programs: list[tuple[int, int, int]] = []
    documents, past = [], cu_seqlens[-1] - queries
    for start, stop in pairwise(cu_seqlens):
        first, end = len(programs), stop - past
        begins = range(max(start - past, 0), end, rows)
        programs += [(begin, min(begin + rows, end), start) for begin in begins]
        documents.append((first, len(programs), start))
    return Tables(*(_on_device(table, device, torch.int32) for table in (programs, documents)))


def without_first_keys(cu_seqlens: Sequence[int], queries: int) -> tuple[int, ...]:
    """Return boundaries where each first key is a document by itself.

    So the kernel reads the tensors as they are, and what it computes for the rows of first keys is
    not used. A first key before the queries is left out: the keys begin after it.
    """
    before = cu_seqlens[-1] > queries
    split = {bound for start in cu_seqlens[:-1] for bound in (start, start + 1)} | {cu_seqlens[-1]}
    return tuple(bound - before for bound in sorted(split) if bound >= before)


def in_one_call(
    slotted: Slotted, call: AttentionCall, cu_seqlens: Sequence[int]
) -> tuple[Slotted, AttentionCall]:
    """Return the op's arguments for all documents; keys of documents without queries are cut."""
    query_BHTD, key_BGSD, value_BGSD, *slot = slotted
    keys = key_BGSD.shape[2]
    lengths = [length for _, length in _sizes(cu_seqlens, query_BHTD.shape[2], keys)]
    if hidden := keys - sum(lengths):
        key_BGSD, value_BGSD = key_BGSD[:, :, hidden:], value_BGSD[:, :, hidden:]
    packed = call._replace(cu_seqlens=tuple(accumulate(lengths, initial=0)))
    return Slotted(query_BHTD, key_BGSD, value_BGSD, *slot), packed


def with_bias_of(keys: int, call: AttentionCall) -> AttentionCall:
    """Return the call with its bias cut to the distances of this many keys."""
    bias_HS = call.distance_bias_HS
    if bias_HS is None or bias_HS.shape[1] == keys:
        return call
    return call._replace(distance_bias_HS=bias_HS[:, :keys])


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
        return tensor.expand(*query_BHTD.shape[:3], *tensor.shape[3:]).split(queries, 2)

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


def check_bias(
    bias_HS: Tensor, query_BHTD: Tensor, keys: int, cu_seqlens: Sequence[int] | None
) -> None:
    """Reject a distance bias of another shape, or of fewer distances than a document has."""
    heads, dtype = query_BHTD.shape[1], statistics_dtype(query_BHTD.dtype)
    shape = list(bias_HS.shape)
    if len(shape) != 2 or shape[0] != heads or bias_HS.dtype is not dtype:
        raise ValueError(
            f"distance_bias_HS must be [{heads}, keys] in {dtype}, got {shape} in {bias_HS.dtype}"
        )
    needed = keys
    if cu_seqlens is not None:
        needed = max(document_lengths(cu_seqlens, keys))
    if shape[1] < needed:
        raise ValueError(f"distance_bias_HS has {shape[1]} distances, but {needed} are needed")
