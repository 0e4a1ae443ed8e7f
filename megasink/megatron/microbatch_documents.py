"""Packed documents of a microbatch, which a context-parallel rank may hold a part of.

Shapes: T tokens of this rank, S tokens of the whole row of documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megasink.attention.documents import document_starts
from megasink.attention.layout import repeat_groups

_CACHE = "megasink_documents"
Range = tuple[int, int]


@dataclass(frozen=True)
class Documents:
    """The documents of one row; everything but the mask is on the host.

    Attributes:
        cu_seqlens: Boundaries 0, .., S.
        padding: Ranges [start, stop) of the row that are not text; they belong to a document, too.
        ranges: Ranges of the row that this rank holds.
        real_1T: Bool mask of this rank's tokens that are not padding; None if the row has none.
    """

    cu_seqlens: tuple[int, ...]
    padding: tuple[Range, ...]
    ranges: tuple[Range, ...]
    real_1T: Tensor | None = None

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(stop - start for start, stop in pairwise(self.cu_seqlens))

    @property
    def tokens(self) -> int:
        """T."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def real_tokens(self) -> int:
        """Number of this rank's tokens that are not padding; may be 0."""
        return sum(self.real_in(*own) for own in self.ranges)

    @property
    def real_in_row(self) -> int:
        """Number of tokens of the row that are not padding, on all context-parallel ranks."""
        return self.real_in(0, self.cu_seqlens[-1])

    def real_in(self, start: int, stop: int) -> int:
        """Return the number of tokens in [start, stop) of the row that are not padding."""
        shared = (min(stop, end) - max(start, first) for first, end in self.padding)
        return stop - start - sum(tokens for tokens in shared if tokens > 0)

    def until(self, stop: int) -> tuple[int, ...]:
        """Return the boundaries of the first `stop` tokens of the row, the last document cut."""
        return (*(bound for bound in self.cu_seqlens if bound < stop), stop)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in their documents, [T] int64."""
        starts_S = document_starts(self.cu_seqlens, device)
        return torch.cat(
            [torch.arange(a, b, device=device) - starts_S[a:b] for a, b in self.ranges]
        )


def row_of_documents(
    cu_seqlens: Sequence[int],
    padding: Sequence[Range] = (),
    *,
    device: torch.device,
    ranks: int = 1,
    rank: int = 0,
) -> Documents:
    """Describe the documents of a row to one of the context-parallel ranks that share it."""
    from megasink.megatron.context_parallel import own_chunks, own_ranges

    tokens = cu_seqlens[-1]
    ranges = own_ranges(tokens, ranks, rank)
    documents = Documents(tuple(cu_seqlens), tuple(padding), ranges)
    if not padding:
        return documents
    if not documents.real_in_row:
        raise ValueError(f"a row of {tokens} tokens is all padding: remove it from the data")
    real_1S = torch.ones(1, tokens, dtype=torch.bool, pin_memory=device.type == "cuda")
    for start, stop in padding:
        real_1S[:, start:stop] = False
    real_1S = real_1S.to(device, non_blocking=True)
    return replace(documents, real_1T=own_chunks(real_1S, ranks, rank, dim=1))


@dataclass
class PackedRow(PackedSeqParams):
    """A row of packed documents, which Megatron treats as one sequence of a batch of 1.

    In its format for documents, thd, Megatron's RoPE reads the boundaries from the device in every
    layer, rotates document by document, and expects the chunks of a context-parallel rank to be
    chunks of each document (``rope_utils.py:_apply_rotary_pos_emb_thd``). Here a rank holds two
    chunks of the row, documents are cut anywhere, and every token has its own angles
    (document_rotary.py). The base class's fields are for Megatron's statistics.
    """

    documents: Documents | None = None


def documents_of(params: PackedSeqParams, tokens: int, ranks: int = 1) -> Documents:
    """Return the documents of a packed microbatch.

    `params` is a `PackedRow`, or in thd format: then boundaries are read from the device once for
    all layers and passes, and cached on it.
    """
    if isinstance(params, PackedRow):
        assert params.documents is not None
        if params.documents.tokens != tokens:
            raise ValueError(
                f"this context-parallel rank has packed documents of {params.documents.tokens} "
                f"tokens, but {tokens} queries"
            )
        return params.documents
    known: Documents | None = params.__dict__.get(_CACHE)
    if known is None:
        known = _read(params, tokens, ranks)
        params.__dict__[_CACHE] = known
    return known


def _read(params: PackedSeqParams, tokens: int, ranks: int) -> Documents:
    if params.qkv_format != "thd":
        raise NotImplementedError(f"packed sequences have format {params.qkv_format!r}: use thd")
    if ranks > 1:
        raise NotImplementedError(
            "under context parallelism Megatron's format thd splits each packed document: pass a "
            "megasink.megatron.microbatch_documents.PackedRow, which splits the row"
        )
    queries, keys = params.cu_seqlens_q, params.cu_seqlens_kv
    if queries is not keys and not torch.equal(queries, keys):
        raise NotImplementedError(
            "the queries and keys of packed sequences have different boundaries: decode each "
            "sequence separately"
        )
    real = queries.tolist()
    padded_q = params.cu_seqlens_q_padded
    padded = real if padded_q is None or padded_q is queries else padded_q.tolist()
    bounds = padded if padded[-1] == tokens else [*padded, tokens]
    # Behind each document's text, and behind the last document.
    ends = [
        start + stop - first for start, (first, stop) in zip(padded, pairwise(real), strict=False)
    ]
    padding = zip([*ends, padded[-1]], [*padded[1:], tokens], strict=True)
    return row_of_documents(
        bounds, [span for span in padding if span[0] < span[1]], device=queries.device
    )


def first_values(
    value_BGSD: Tensor,
    heads: int,
    cu_seqlens: Sequence[int] | None = None,
    tokens: int | None = None,
) -> Tensor:
    """Return the value of the first key of each token's document, without gradient.

    [B, H, 1, D], or for packed documents [B, H, T, D] of the last T `tokens` (None for all).
    """
    first_BGTD = value_BGSD.detach()[:, :, :1]
    if cu_seqlens is not None:
        starts_S = document_starts(cu_seqlens, value_BGSD.device)
        skipped = 0 if tokens is None else len(starts_S) - tokens
        first_BGTD = value_BGSD.detach()[:, :, starts_S[skipped:]]
    return repeat_groups(first_BGTD, heads)
