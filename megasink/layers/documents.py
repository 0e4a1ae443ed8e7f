"""Packed documents of a batch, read from Megatron's PackedSeqParams.

Shapes: T tokens of the pack.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megasink.attention.layout import repeat_groups

_CACHE = "megasink_documents"


@dataclass(frozen=True)
class Documents:
    """The documents of one pack.

    Attributes:
        cu_seqlens: Boundaries 0, .., T on the host; padding belongs to the preceding document.
        real_tokens: Number of tokens that are not padding.
        real_1T: Bool mask of these tokens; None if there is no padding.
    """

    cu_seqlens: tuple[int, ...]
    real_tokens: int
    real_1T: Tensor | None = None

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(stop - start for start, stop in pairwise(self.cu_seqlens))


def documents_of(params: PackedSeqParams | None, tokens: int) -> Documents | None:
    """Return the documents of a microbatch; None if it is not packed.

    Boundaries are read from the device once for all layers and passes, and cached on `params`.

    Args:
        params: Packing parameters in thd format.
        tokens: T of query and key.

    Raises:
        NotImplementedError: The format is not thd, or keys are packed differently from queries.
    """
    if params is None:
        return None
    known: Documents | None = params.__dict__.get(_CACHE)
    if known is None:
        known = _read(params, tokens)
        params.__dict__[_CACHE] = known
    return known


def with_documents(params: PackedSeqParams, cu_seqlens: list[int]) -> PackedSeqParams:
    """Cache on `params` the boundaries of `cu_seqlens_q` already known to the host; return it."""
    params.__dict__[_CACHE] = Documents(tuple(cu_seqlens), cu_seqlens[-1])
    return params


def _read(params: PackedSeqParams, tokens: int) -> Documents:
    if params.qkv_format != "thd":
        raise NotImplementedError(f"packed sequences in the format {params.qkv_format!r}: use thd")
    queries, keys = params.cu_seqlens_q, params.cu_seqlens_kv
    if queries is not keys and not torch.equal(queries, keys):
        raise NotImplementedError(
            "packed sequences whose queries and keys have other boundaries: decode each by itself"
        )
    real = queries.tolist()
    padded_q = params.cu_seqlens_q_padded
    padded = real if padded_q is None or padded_q is queries else padded_q.tolist()
    bounds = padded if padded[-1] == tokens else [*padded, tokens]
    lengths = [stop - start for start, stop in pairwise(real)]
    if sum(lengths) == tokens:
        return Documents(tuple(bounds), tokens)
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    for start, length in zip(padded, lengths, strict=False):
        mask[:, start : start + length] = True
    return Documents(tuple(bounds), sum(lengths), mask.to(queries.device))


def first_values(value_BGSD: Tensor, heads: int, cu_seqlens: Sequence[int] | None = None) -> Tensor:
    """Return the value of the first key of each token's document, without gradient.

    Returns:
        [B, H, 1, D]; [B, H, T, D] for packed documents.
    """
    first_T = torch.zeros(1, dtype=torch.int64)
    if cu_seqlens is not None:
        bounds = torch.tensor(cu_seqlens)
        first_T = bounds[:-1].repeat_interleave(bounds.diff())
    return repeat_groups(value_BGSD.detach()[:, :, first_T.to(value_BGSD.device)], heads)
