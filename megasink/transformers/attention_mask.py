"""Locate the sequences of a batch; replaces a mask [B, 1, T, S].

transformers calls `megasink_mask` once per forward and kind of layer, and passes its result to the
attention function of each layer. Nothing of size T x S is made.

Some models (GPT-OSS) pass the position ids of packed documents to their attention alone. They are
read as transformers' flash attention does: a position that does not follow the one before begins a
document.

Shapes: B rows, T queries or tokens, S keys, N documents.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from megasink.errors import UserError
from megasink.transformers.row_order import RowOrder, row_order


@dataclass(frozen=True, eq=False)
class Sequences:
    """The keys that each query sees; with sizes alone, causal attention over whole rows."""

    # `generate` makes masks for static caches in advance. Models ask them for their dimensions (4:
    # nothing is left to convert), and `generate` for `contiguous`. Any other use of a
    # mask belongs to attention that megasink would not compute, and is refused.
    ndim = 4

    queries: int  # T
    length: int  # keys that the attention function is called with
    keys: int  # S, the first ones that are used: a static cache is longer than its content
    window: int | None = None  # tokens visible to a token, including itself; None for all
    real_BS: Tensor | None = None  # True for tokens that are not padding; None without a mask
    # Boundaries 0, .., B * T of packed documents, row after row; None for one per row.
    documents: tuple[int, ...] | None = None
    order: RowOrder | None = None  # moves padding to the end of rows; None if it is there already
    # Positions of the first query (a tensor under torch.compile) and key, given if only a mask
    # shows the visible keys (`masked_attention`).
    first_query: int | Tensor | None = None
    first_key: int | None = None
    # False for a mask that is refused when it is used: decoders of an encoder-decoder make one for
    # a cross-attention that they may not run.
    causal: bool = True

    def contiguous(self) -> Self:
        """Return the sequences."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise _NoTensor(_COMPUTED_WITH)

    def __getitem__(self, place: object) -> NoReturn:
        raise UserError(_COMPUTED_WITH)

    @classmethod
    def __torch_function__(cls, *_: object) -> NoReturn:
        raise UserError(_COMPUTED_WITH)


def megasink_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | Sequences | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Sequences:
    """Return the sequences of a batch; the arguments are those of transformers' `sdpa_mask`.

    Waits once for the device if there is padding or packed documents, never under torch.compile.

    Raises:
        UserError: megasink does not compute this mask.
    """
    if isinstance(attention_mask, Sequences):  # made by `generate` for a static cache
        return attention_mask
    if allow_is_bidirectional_skip is not None:  # given for bidirectional masks only
        return Sequences(q_length, kv_length, kv_length, causal=False)
    if use_vmap:  # the model adds its own mask
        refuse(config, "it adds another mask to the causal one (a prefix, images, or similar)")
    if local_size is not None and local_size == getattr(config, "attention_chunk_size", None):
        refuse(config, f"its attention is chunked (attention_chunk_size {local_size})")
    if attention_mask is not None and attention_mask.ndim != 2:
        refuse(config, f"its mask has {attention_mask.ndim} dimensions, not [rows, tokens]")
    documents = None
    # Then `mask_function` may be more than causal or sliding-window.
    if not allow_is_causal_skip and q_length > 1 and mask_function is not None:
        sees = _neighbors(mask_function, batch_size, q_length, q_offset, device)
        documents = _documents(sees, config, complete=q_length == kv_length)
    compiling = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor) and not compiling:
        q_offset = int(q_offset)
    keys, aligned = kv_length, False
    if not isinstance(q_offset, Tensor):
        filled = q_offset + q_length - kv_offset  # keys up to the last query's own
        # A compiled graph keeps the shape of a static cache.
        keys = kv_length if compiling else min(filled, kv_length)
        aligned = keys == filled
    real_BS = None
    if attention_mask is not None:
        missing = kv_offset + kv_length - attention_mask.shape[1]
        real_BS = torch.nn.functional.pad(attention_mask, (0, max(missing, 0)))
        real_BS = real_BS[:, kv_offset : kv_offset + keys]
    order, masked = None, not aligned
    if aligned and real_BS is not None:
        order, masked = _padding(real_BS, q_length, config)
    return Sequences(
        q_length,
        kv_length,
        keys,
        local_size,
        real_BS,
        documents,
        order,
        q_offset if masked else None,
        kv_offset if masked else None,
    )


def _padding(real_BS: Tensor, queries: int, config: Any) -> tuple[RowOrder | None, bool]:
    """Return the order that moves padding to the end, if needed, and whether a mask is needed."""
    complete = queries == real_BS.shape[1]
    # A token after padding, and after a token before that.
    begins_BS = real_BS[:, 1:] & ~real_BS[:, :-1]
    holes_B = begins_BS.sum(-1) > (~real_BS[:, 0]).to(torch.int64)
    if torch.compiler.is_compiling():
        if not complete:
            return None, True
        torch._assert_async(~holes_B.any(), _HOLES)
        return row_order(real_BS), False
    real, before, holes = torch.stack(
        (real_BS.all(), (~real_BS[:, 0]).any(), holes_B.any())
    ).tolist()
    if real or (queries > 1 and not before and not holes):
        return None, False  # a real query is before the trailing padding
    if queries == 1 or not complete or holes:
        return None, True
    return row_order(real_BS), False


def _neighbors(
    mask_function: Callable[..., Tensor],
    rows: int,
    queries: int,
    first_query: int | Tensor,
    device: torch.device | str,
) -> Tensor:
    """Evaluate a mask beside its diagonal."""
    row = torch.arange(rows, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.int64, device=device)[None, :, None, None]
    first = (torch.arange(queries - 1, device=device) + first_query)[None, None, :, None]
    sees = (mask_function(row, head, first, first + 1), mask_function(row, head, first + 1, first))
    return torch.stack([seen.expand(rows, 1, queries - 1, 1)[:, 0, :, 0] for seen in sees])


def _documents(sees_2BT: Tensor, config: Any, *, complete: bool) -> tuple[int, ...] | None:
    """Return the boundaries of documents, None for one per row."""
    if torch.compiler.is_compiling():
        ordinary_BT = ~sees_2BT[0] & sees_2BT[1] if complete else ~sees_2BT[0]
        torch._assert_async(ordinary_BT.all(), PACKED_AND_COMPILED)
        return None
    later_BT, earlier_BT = sees_2BT.cpu()
    if bool(later_BT.any()):
        refuse(config, "some of its tokens attend to later ones")
    return boundaries(~earlier_BT) if complete else None


def boundaries(begins_BT: Tensor) -> tuple[int, ...] | None:
    """Return the boundaries of documents in concatenated rows."""
    if not bool(begins_BT.any()):
        return None
    starts_BT = torch.nn.functional.pad(begins_BT, (1, 0), value=True)
    return (*starts_BT.flatten().nonzero().flatten().tolist(), starts_BT.numel())


def refuse(config: Any, what: str, cure: str = 'use "eager"') -> NoReturn:
    """Raise the error for a model or an input that megasink does not support."""
    name = getattr(config, "model_type", None) or "this model"
    raise UserError(f'attn_implementation="megasink" cannot run {name}: {what}: {cure}')


class _NoTensor(UserError, AttributeError):
    """Answer attribute queries for a tensor: `hasattr` returns False."""


_COMPUTED_WITH = (
    'attn_implementation="megasink" cannot run this model, which reads its attention mask: '
    'megasink never materializes the mask, so use "eager"'
)
PACKED_AND_COMPILED = (
    'attn_implementation="megasink" does not support packed documents under torch.compile'
)
_HOLES = (
    'attn_implementation="megasink" under torch.compile needs padding on one side, not between '
    "tokens"
)


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
    """Return the boundaries of documents as in `Sequences`; waits once per forward."""
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
