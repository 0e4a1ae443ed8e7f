"""Packed documents as attention layers see them: by position ids or cumulative lengths.

Some models (GPT-OSS) pass position ids to their attention alone, not to their masks. They are read
as transformers' flash attention does: a position that does not follow the one before begins a
document.

Shapes: B rows, T tokens, N documents.
"""

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.transformers.attention_mask import PACKED_AND_COMPILED, boundaries, refuse


class _Read(NamedTuple):
    """The values read from a tensor, for all layers that receive it."""

    tensor: weakref.ref[Tensor]
    version: int
    rows: int
    real_BT: weakref.ref[Tensor] | None
    documents: tuple[int, ...] | None


_reads: deque[_Read] = deque(maxlen=4)  # layers with a window have a mask of their own


def documents_of(
    rows: int,
    tokens: int,
    position_ids: Tensor | None,
    cumulative_N: Tensor | None,
    real_BT: Tensor | None = None,
) -> tuple[int, ...] | None:
    """Return the boundaries of documents, as in `Sequences`.

    Waits for the device once per forward, not once per layer. Under torch.compile, position ids of
    packed documents fail an assertion on the device.
    """
    tensor = position_ids if cumulative_N is None else cumulative_N
    if tensor is None:
        return None
    if cumulative_N is None and (tensor.shape not in ((rows, tokens), (1, tokens)) or tokens == 1):
        return None
    if torch.compiler.is_compiling():
        if cumulative_N is None:
            torch._assert_async(~_begins(tensor, rows, real_BT).any(), PACKED_AND_COMPILED)
            return None
        raise NotImplementedError(PACKED_AND_COMPILED)
    return _read(tensor, rows, real_BT, cumulative=cumulative_N is not None)


def refuse_packed(
    config: Any, position_ids: Tensor | None, cumulative_N: Tensor | None, real_BT: Tensor
) -> None:
    """Refuse packed documents with an attention mask, which makes each row one sequence."""
    rows, tokens = real_BT.shape
    documents = documents_of(rows, tokens, position_ids, cumulative_N, real_BT)
    inside = [start for start in documents or () if start % tokens]
    if inside:
        row, token = divmod(inside[0], tokens)
        refuse(
            config,
            f"row {row} has a document that begins at token {token} (position ids, "
            "cu_seq_lens_q), but the attention mask makes the row one sequence",
            "leave out attention_mask",  # "eager" too would ignore the documents
        )


def _begins(positions: Tensor, rows: int, real_BT: Tensor | None) -> Tensor:
    """Return whether a document begins at token i + 1, [B, T - 1]."""
    steps_BT = positions.expand(rows, -1).diff(dim=-1)
    if real_BT is None:
        return steps_BT != 1
    real_BT = real_BT.to(steps_BT.device)
    return (steps_BT <= 0) & real_BT[:, 1:] & real_BT[:, :-1]


def _read(
    tensor: Tensor, rows: int, real_BT: Tensor | None, *, cumulative: bool
) -> tuple[int, ...] | None:
    version = 0 if tensor.is_inference() else tensor._version
    for read in _reads:
        same = real_BT is None if read.real_BT is None else read.real_BT() is real_BT is not None
        if same and read.tensor() is tensor and read[1:3] == (version, rows):
            return read.documents
    documents: tuple[int, ...] | None
    if cumulative:
        documents = tuple(dict.fromkeys(tensor.tolist()))  # an empty document repeats a boundary
    else:
        documents = boundaries(_begins(tensor, rows, real_BT).cpu())
    mask = None if real_BT is None else weakref.ref(real_BT)
    _reads.append(_Read(weakref.ref(tensor), version, rows, mask, documents))
    return documents
