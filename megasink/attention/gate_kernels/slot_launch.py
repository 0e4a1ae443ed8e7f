"""Launch the Triton kernels of a slot on PyTorch tensors; helpers for all launches.

Shapes: B batch, H query heads, G key/value groups, T queries, D head dim, N programs per head, C
leading channels that carry the gradient of the LSE; 1 for a dimension that broadcasts.
"""

from dataclasses import dataclass
from math import gcd
from os import environ
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasink.attention.call import Arriving, Results, Slotted
from megasink.attention.gate_kernels.protocol import FirstKey
from megasink.attention.injection import channels_of
from megasink.attention.kernels.cuda import device_of
from megasink.attention.layout import dense_rows

if TYPE_CHECKING:
    from megasink.attention.documents import Tables

# Bytes of a program's tile: each of 128 threads holds four vectors of 16 bytes. Half as many where
# a third tensor is read, or registers would spill.
TILE, TILE_OF_THREE = 8192, 4096
ROWS_TO_RESTORE = 256
# Products and sums are not contracted: the injected rows are PyTorch's to the last bit.
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


@dataclass(frozen=True)
class SlotGradients:
    """Results of `slot_backward`; None where not asked for."""

    # grad_out_BHTD, out_BHTD: Hold the injected rows, if `kept` is not None.
    grad_out_BHTD: Tensor
    out_BHTD: Tensor
    kept: Tensor | None  # What `restore` puts back
    lse_grad_BHT: Tensor | None  # p dG + e
    # logit_grad_BHT, logit_sum_BHN: ds, and its sum over each program's rows.
    logit_grad_BHT: Tensor | None
    logit_sum_BHN: Tensor | None
    # value_sum_BHND, key_sum_BHND: p dY and scale * ds q, summed likewise.
    value_sum_BHND: Tensor | None
    key_sum_BHND: Tensor | None


def writable(tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor, or a copy if its elements overlap or its last dimension is not dense."""
    extent = 1
    for stride, size in sorted(zip(tensor_BHTD.stride(), tensor_BHTD.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return tensor_BHTD.contiguous()
            extent = stride * (size - 1) + extent
    return dense_rows(tensor_BHTD)


def lent(
    arriving: Arriving, slotted: Slotted, results: Results, lends: bool
) -> tuple[Arriving, Results]:
    """Return dO and Y for gate kernels to overwrite: copies, unless nothing else uses their memory.

    `out.backward(out.detach())` sends a dO in the memory of Y, and any input may be sent as dO.
    """
    storages = [
        t.untyped_storage()._cdata for t in (*arriving, *slotted, *results) if t is not None
    ]

    def own(tensor: Tensor) -> Tensor:
        alone = storages.count(tensor.untyped_storage()._cdata) == 1  # its own
        return tensor if lends and alone else tensor.clone()

    assert arriving.grad_out_BHTD is not None
    arriving = arriving._replace(grad_out_BHTD=own(arriving.grad_out_BHTD))
    return arriving, results._replace(out_BHTD=own(results.out_BHTD))


def slot_forward(
    results: Results,
    rows: tuple[Tensor, Tensor] | None,
    value: Tensor | None,
    *,
    logit: Tensor | None = None,
    first: FirstKey | None = None,
    scale: float = 1.0,
    visible: int = 0,
) -> None:
    """Fill `results` from out and lse of the attention kernel; out may be that of `results`."""
    from megasink.attention.gate_kernels.triton_slot import close_slot_kernel

    batch, heads, tokens, head_dim = results.out_BHTD.shape
    out, lse = (None, None) if rows is None else rows
    query, key = (None, None) if first is None else (first.query_BHTD, first.key_BG1D)
    align = alignment(out, results.out_BHTD, value, query, key)
    columns, block, grid = tiles(results.out_BHTD, TILE if first is None else TILE_OF_THREE, query)
    documents, grid = of_documents(first, block, grid)
    alone = 0 if first is None else first.alone
    if first is not None and documents is not None:
        alone = 1 - (first.keys - tokens)
    key_dim = head_dim if query is None else query.shape[-1]
    with device_of(results.out_BHTD):
        close_slot_kernel[grid](
            out,
            *strides(out, align),
            lse,
            *strides(lse),
            results.out_BHTD,
            *strides(results.out_BHTD, align),
            *results[1:],
            logit,
            *strides(logit),
            value,
            *strides(value, align),
            query,
            *strides(query, align),
            key,
            *strides(key, align),
            documents,
            scale,
            visible,
            alone,
            batch,
            heads,
            1 if key is None else heads // key.shape[1],
            tokens,
            D=head_dim,
            COLUMNS=columns,
            KEY_D=key_dim,
            KEY_COLUMNS=columns_of(key_dim),
            ROWS=block,
            ALIGN=align,
            ROUND_BY_HAND=interpreted(),
            **OPTIONS,
        )


def slot_backward(
    arriving: Arriving,
    results: Results,
    value: Tensor | None,
    *,
    inject: bool,
    logit_grad: bool = False,
    logit_sum: bool = False,
    value_sum: bool = False,
    own_sink: bool = False,
    first: FirstKey | None = None,
    scale: float = 1.0,
) -> SlotGradients:
    """Take the gradients asked for; see `GateKernels.slot_backward` and `first_key_backward`.

    `inject` writes the gradient of the LSE into the leading channels of the incoming gradient and
    of out, in place; otherwise it is returned.
    """
    from megasink.attention.gate_kernels.triton_slot import open_slot_kernel

    grad_out, grad_lse, grad_gate = arriving
    assert grad_out is not None
    out, weight = results.out_BHTD, results.weight_BHT
    has_lse_grad = not (grad_lse is None and grad_gate is None)
    inject &= has_lse_grad
    grad_out = writable(grad_out) if inject else dense_rows(grad_out)
    query = None if first is None else first.query_BHTD
    align = alignment(grad_out, out, value, query)
    batch, heads, tokens, head_dim = out.shape
    columns, block, grid = tiles(out, TILE if first is None else TILE_OF_THREE, query)
    documents, grid = of_documents(first, block, grid)
    key_dim = head_dim if query is None else query.shape[-1]
    channels = channels_of(out)
    programs = (batch, heads, grid[0] // (batch * heads))

    def new(needed: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return out.new_empty(shape, dtype=dtype) if needed else None

    gradients = SlotGradients(
        grad_out,
        out,
        new(inject, batch, heads, tokens, 2 * channels, dtype=out.dtype),
        new(has_lse_grad and not inject, batch, heads, tokens),
        new(logit_grad, batch, heads, tokens),
        new(logit_sum, *programs),
        new(value_sum, *programs, head_dim),
        new(first is not None, *programs, key_dim),
    )
    if not (has_lse_grad or logit_grad or logit_sum):
        return gradients
    with device_of(out):
        open_slot_kernel[grid](
            grad_out,
            *strides(grad_out, align),
            out,
            *strides(out, align),
            None if grad_gate is None else results.gate_BHT,
            weight if weight.numel() else None,
            grad_gate,
            *strides(grad_gate),
            grad_lse,
            *strides(grad_lse),
            value,
            *strides(value, align),
            query,
            *strides(query, align),
            documents,
            gradients.kept,
            gradients.lse_grad_BHT,
            gradients.logit_grad_BHT,
            gradients.logit_sum_BHN,
            gradients.value_sum_BHND,
            gradients.key_sum_BHND,
            scale,
            batch,
            heads,
            1 if first is None else heads // first.key_BG1D.shape[1],
            tokens,
            D=head_dim,
            COLUMNS=columns,
            KEY_D=key_dim,
            KEY_COLUMNS=columns_of(key_dim),
            ROWS=block,
            CHANNELS=channels,
            OWN_SINK=own_sink,
            ALIGN=align,
            ROUND_BY_HAND=interpreted(),
            **OPTIONS,
        )
    return gradients


def restore(gradients: SlotGradients) -> None:
    """Undo what `slot_backward` changed in place."""
    from megasink.attention.gate_kernels.triton_slot import restore_kernel

    if gradients.kept is None:
        return
    grad_out, out = gradients.grad_out_BHTD, gradients.out_BHTD
    batch, heads, tokens, _ = out.shape
    align = alignment(grad_out, out)
    with device_of(out):
        restore_kernel[(batch * heads * _blocks(tokens, ROWS_TO_RESTORE),)](
            grad_out,
            *strides(grad_out, align),
            out,
            *strides(out, align),
            gradients.kept,
            batch,
            heads,
            tokens,
            ROWS=ROWS_TO_RESTORE,
            CHANNELS=channels_of(out),
            ALIGN=align,
            **OPTIONS,
        )


def _blocks(tokens: int, rows: int) -> int:
    return -(-tokens // rows)


def columns_of(head_dim: int) -> int:
    """Return the power of two of a tile's columns."""
    return 1 << (head_dim - 1).bit_length()


def tiles(
    out_BHTD: Tensor, size: int, query_BHTD: Tensor | None = None
) -> tuple[int, int, tuple[int]]:
    """Return columns and rows of a program's tile, powers of two, and the grid.

    Rows are as many as fit the widest of the tiles, that of the query if one is read.
    """
    batch, heads, tokens, head_dim = out_BHTD.shape
    columns = columns_of(head_dim)
    widest = columns if query_BHTD is None else columns_of(query_BHTD.shape[-1])
    rows = max(1, min(128, size // (widest * out_BHTD.element_size())))
    return columns, rows, (batch * heads * _blocks(tokens, rows),)


def tables(first: FirstKey, rows: int) -> "Tables":
    """Return which program has which rows of packed documents."""
    from megasink.attention.documents import tables_of

    assert first.documents is not None
    query_BHTD = first.query_BHTD
    return tables_of(first.documents, query_BHTD.shape[2], rows, query_BHTD.device)


def of_documents(
    first: FirstKey | None, rows: int, grid: tuple[int]
) -> tuple[Tensor | None, tuple[int]]:
    """Return the table of programs and their grid; None and this grid without documents."""
    if first is None or first.documents is None:
        return None, grid
    programs = tables(first, rows).programs
    return programs, (first.query_BHTD.shape[0] * first.query_BHTD.shape[1] * len(programs),)


def alignment(*tensors_BHTD: Tensor | None) -> int:
    """Return the largest number of elements, at most 16 bytes, that divides every stride."""
    given = [tensor for tensor in tensors_BHTD if tensor is not None]
    most = 16 // min(tensor.element_size() for tensor in given)
    return gcd(most, *(stride for tensor in given for stride in strides(tensor)))


def strides(tensor: Tensor | None, align: int = 1) -> list[int]:
    """Return the strides of batch, heads and tokens in units of `align`; 0 where they broadcast."""
    if tensor is None:
        return [0, 0, 0]
    sizes, strides = tensor.shape[:3], tensor.stride()[:3]
    if strides[2] >= 2**31 // (1024 if len(tensor.shape) == 3 else 256):
        raise ValueError(
            f"tokens lie {strides[2]} elements apart, farther than a program of the Triton gate "
            "kernels reaches: use a smaller batch, or a kernel with +torch"
        )
    return [0 if n == 1 else s // align for n, s in zip(sizes, strides, strict=True)]


def interpreted() -> bool:
    """Return whether Triton interprets its kernels, on a CPU."""
    return environ.get("TRITON_INTERPRET") == "1"
