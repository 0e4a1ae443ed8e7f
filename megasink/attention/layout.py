"""Memory layout of results, and row sums in full precision.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, D head dim.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast() -> AbstractContextManager[None]:
    """Return a context without autocast, which would multiply float32 matrices in 16 bits."""
    return torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else nullcontext()


def empty_in_order_of(like_BHTD: Tensor, width: int | None = None) -> Tensor:
    """Return an empty dense tensor with the shape and the memory order of `like`.

    For an [s, b, h, d] query permuted to [b, h, s, d], the result can be viewed as [s, b, h * d].
    `width` is another size of the last dimension.
    """
    sizes = (*like_BHTD.shape[:3], like_BHTD.shape[3] if width is None else width)
    strides = _dense_strides(sizes, like_BHTD)
    return torch.empty_strided(sizes, strides, dtype=like_BHTD.dtype, device=like_BHTD.device)


def padded(tensor_BHTD: Tensor, width: int) -> Tensor:
    """Return the tensor with zeros up to this size of the last dimension, in its memory order."""
    own = tensor_BHTD.shape[-1]
    if own == width:
        return tensor_BHTD
    wide_BHTD = empty_in_order_of(tensor_BHTD, width)
    wide_BHTD[..., :own] = tensor_BHTD
    wide_BHTD[..., own:] = 0
    return wide_BHTD


def in_order_of(like_BHTD: Tensor, tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor in the memory layout of `empty_in_order_of`, copied only if needed."""
    view_BHTD = as_order_of(like_BHTD, tensor_BHTD)
    if view_BHTD is None:
        view_BHTD = empty_in_order_of(like_BHTD, tensor_BHTD.shape[-1]).copy_(tensor_BHTD)
    return view_BHTD


def as_order_of(like_BHTD: Tensor, tensor_BHTD: Tensor) -> Tensor | None:
    """Return a view in the memory layout of `empty_in_order_of`, or None if there is none."""
    sizes, strides = tensor_BHTD.shape, tensor_BHTD.stride()
    wanted = _dense_strides(sizes, like_BHTD)
    if strides == wanted:
        return tensor_BHTD
    if all(n == 1 or a == b for n, a, b in zip(sizes, strides, wanted, strict=True)):
        return tensor_BHTD.as_strided(sizes, wanted)
    return None


def _dense_strides(sizes: Sequence[int], like_BHTD: Tensor) -> tuple[int, ...]:
    """Return dense strides in the order of `like`'s first three dimensions, the last innermost."""
    given = like_BHTD.stride()
    strides, step = [0, 0, 0, 1], sizes[3]
    for dim in sorted((0, 1, 2), key=given.__getitem__):
        strides[dim] = step
        step *= sizes[dim]
    return tuple(strides)


def dense_rows(tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor with a dense last dimension, copied only if needed."""
    return tensor_BHTD if tensor_BHTD.stride(-1) == 1 else tensor_BHTD.contiguous()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def row_dot(left_BHTD: Tensor, right_BHTD: Tensor) -> Tensor:
    """Return sum_d left * right, [B, H, T] in the statistics dtype."""
    wide_BHTD = left_BHTD if left_BHTD.dtype.itemsize > 2 else left_BHTD.float()
    return (wide_BHTD * right_BHTD).sum(-1)


def dot_with_each_row(rows_BHTD: Tensor, vector_BH1D: Tensor) -> Tensor:
    """Return rows . vector, or . a row each, [B, H, T] in the statistics dtype, never in TF32.

    A GPU multiplies float32 matrices in TF32 where the environment allows it (NVIDIA's images do).
    Its 10 bits change a logit of 20 by 0.01, and with it the gate by 1%.
    """
    if rows_BHTD.is_cuda or vector_BH1D.shape[2] > 1:
        return row_dot(rows_BHTD, vector_BH1D)
    dtype = statistics_dtype(rows_BHTD.dtype)
    product_BHT1: Tensor = rows_BHTD.to(dtype) @ vector_BH1D.to(dtype).transpose(-1, -2)
    return product_BHT1.squeeze(-1)


def repeat_groups(tensor_BGSD: Tensor, heads: int) -> Tensor:
    """Repeat each group's rows for each of its query heads: [B, H, S, D]."""
    repeats = heads // tensor_BGSD.shape[1]
    return tensor_BGSD if repeats == 1 else tensor_BGSD.repeat_interleave(repeats, dim=1)


def weighted_row_sum(weight_BHT: Tensor, rows_BHTD: Tensor, groups: int) -> Tensor:
    """Sum weight * row over tokens and the heads of a group: [B, G, D], statistics dtype.

    Like `dot_with_each_row`, never in TF32.
    """
    if rows_BHTD.is_cuda:
        sum_BHD = (weight_BHT[..., None] * rows_BHTD).sum(2)
    else:
        sum_BHD = (weight_BHT.unsqueeze(2) @ rows_BHTD.to(weight_BHT.dtype)).squeeze(2)
    return sum_BHD.unflatten(1, (groups, -1)).sum(2)


def gate_sum(gate_BHT: Tensor, mask_BT: Tensor | None = None) -> Tensor:
    """Sum each head's gate over tokens: the numerator of head importance (P0.10, Eq. 5).

    The importance is the sum over all batches and ranks divided by the number of counted tokens,
    which are True in `mask_BT` (None for all). The sum [H] is differentiable, float32 or float64.
    """
    if mask_BT is not None:
        # Not a product with the mask: the gate of a padding token may be NaN.
        gate_BHT = gate_BHT.masked_fill(~mask_BT[:, None, :], 0.0)
    return gate_BHT.sum((0, 2), dtype=statistics_dtype(gate_BHT.dtype))
