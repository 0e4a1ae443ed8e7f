"""Attention over packed documents, each attending only to itself.

Attention runs per document, so it is exact for every variant, gate and mask on every backend.
Documents of the same length share a call.

Shapes: B batch, H query heads, T tokens of the pack, D head dim.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megasink.attention.reference import AttentionOutput


def document_lengths(cu_seqlens: Sequence[int], tokens: int) -> list[int]:
    """Return the lengths of the non-empty documents.

    Args:
        cu_seqlens: Boundaries 0, .., tokens, on the host, because they determine kernel launches.

    Raises:
        ValueError: The boundaries do not cover the tokens in order.
    """
    bounds = [int(bound) for bound in cu_seqlens]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[:1] != [0] or bounds[-1] != tokens or min(lengths, default=-1) < 0:
        shown = bounds if len(bounds) < 9 else [*bounds[:4], "...", *bounds[-4:]]
        raise ValueError(f"cu_seqlens must grow from 0 to the {tokens} tokens, got {shown}")
    return [length for length in lengths if length]


def attend_by_document(
    attend: Callable[..., AttentionOutput], cu_seqlens: Sequence[int] | None, *tensors_BNTX: Tensor
) -> AttentionOutput:
    """Call `attend` on each document, or once if `cu_seqlens` is None.

    Args:
        attend: Takes `tensors_BNTX` of one document, or of a batch of documents of equal length.
        tensors_BNTX: Query, key, value and other per-token tensors (tokens in dimension 2).

    Returns:
        The results in token order; the memory layout of out_BHTD is [T, B, H, D].
    """
    if cu_seqlens is None:
        return attend(*tensors_BNTX)
    lengths = document_lengths(cu_seqlens, tensors_BNTX[0].shape[2])
    # Use split, not slices: its backward is one concatenation, while each slice's backward
    # allocates a tensor of the size of the pack.
    parts = list(zip(*(tensor.split(lengths, 2) for tensor in tensors_BNTX), strict=True))
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        by_length[length].append(index)
    results: dict[int, tuple[Tensor | None, ...]] = {}
    for members in by_length.values():
        if len(members) == 1:
            results[members[0]] = attend(*parts[members[0]])
            continue
        alike = zip(*(parts[member] for member in members), strict=True)
        batched = attend(*(torch.cat(same) for same in alike))
        pieces = [[None] * len(members) if t is None else t.chunk(len(members)) for t in batched]
        results |= dict(zip(members, zip(*pieces, strict=True), strict=True))
    ordered = [results[index] for index in range(len(lengths))]
    out_TBHD = torch.cat([out.permute(2, 0, 1, 3) for out, _, _ in ordered if out is not None])
    lse_BHT = torch.cat([lse for _, lse, _ in ordered if lse is not None], 2)
    gates_BHT = [gate for _, _, gate in ordered if gate is not None]
    gate_BHT = torch.cat(gates_BHT, 2) if gates_BHT else None
    return AttentionOutput(out_TBHD.permute(1, 2, 0, 3), lse_BHT, gate_BHT)
