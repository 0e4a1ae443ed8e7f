"""Packed documents as attention layers see them: by position ids or cumulative lengths.

Some models (GPT-OSS) pass position ids to their attention alone, not to their masks. They are read
as transformers' flash attention does: a position that does not follow the one before begins a
document.

Shapes: B rows, T tokens, N documents.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from megasink.transformers.sequences import PACKED_AND_COMPILED, boundaries


class _Read(NamedTuple):
    """What was read from a tensor, for the layers that are given the same one."""

    tensor: weakref.ref[Tensor]
    version: int
    rows: int
    documents: tuple[int, ...] | None


_last: _Read | None = None


def documents_of(
    rows: int, tokens: int, position_ids: Tensor | None, cumulative_N: Tensor | None
) -> tuple[int, ...] | None:
    """Return the boundaries of documents, as in `Sequences`.

    Waits for the device once per forward, not once per layer. Under torch.compile, position ids of
    packed documents fail an assertion on the device.

    Args:
        position_ids: [B or 1, T], or another shape, which says nothing about documents; None for
            one document per row.
        cumulative_N: `cu_seq_lens_q`: 0, .., B * T; it wins over the positions.
    """
    tensor = position_ids if cumulative_N is None else cumulative_N
    if tensor is None:
        return None
    if cumulative_N is None and (tensor.shape not in ((rows, tokens), (1, tokens)) or tokens == 1):
        return None
    if torch.compiler.is_compiling():
        if cumulative_N is None:
            torch._assert_async((tensor.diff(dim=-1) == 1).all(), PACKED_AND_COMPILED)
            return None
        raise NotImplementedError(PACKED_AND_COMPILED)
    return _read(tensor, rows, cumulative=cumulative_N is not None)


def _read(tensor: Tensor, rows: int, *, cumulative: bool) -> tuple[int, ...] | None:
    global _last
    version = 0 if tensor.is_inference() else tensor._version
    last = _last
    if last is not None and last.tensor() is tensor and last[1:3] == (version, rows):
        return last.documents
    documents: tuple[int, ...] | None
    if cumulative:
        documents = tuple(dict.fromkeys(tensor.tolist()))  # an empty document repeats a boundary
    else:
        documents = boundaries((tensor.expand(rows, -1).diff(dim=-1) != 1).cpu())
    _last = _Read(weakref.ref(tensor), version, rows, documents)
    return documents
