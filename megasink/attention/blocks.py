"""Masks that kernels do not know, as lists of blocks that they do.

A kernel answers causal squares and unmasked rectangles. A softmax over more keys is the merge of
blocks by their log-sum-exps, and the backward of each block, handed the merged output and LSE, is
its exact share of the gradient (docs/maths.md). Sliding windows, prefixes and bottom-right causal
rectangles become such lists, on every backend, and nothing is S x S, masks included. A bias by
distance is for backends that take the whole causal mask with it.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim; N blocks of one size,
folded into the batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.attention.backends.base import Backend


class Block(NamedTuple):
    """`repeats` blocks of one size, `stride` tokens apart, as one kernel call.

    Attributes:
        mask: "full", "causal" (row r sees columns <= r) or "anticausal" (columns >= r: the edge of
            a sliding window; it is the causal mask of the reversed block).
        query: first query; key: first key.
        queries, keys: size of a block.
    """

    mask: str
    query: int
    key: int
    queries: int
    keys: int
    repeats: int = 1
    stride: int = 0


def plan_blocks(
    queries: int, keys: int, window: int | None = None, prefix: int = 0
) -> tuple[Block, ...]:
    """The causal mask, its last query at the last key, as blocks that share no (query, key) pair.

    Args:
        queries, keys: T <= S; with a prefix also T = S + 1, key 0 taken out as the slot.
        window: tokens visible to a token, itself included; None for all.
        prefix: keys that every query sees; not with a window.

    Raises:
        ValueError: more queries than keys.
    """
    if prefix and prefix > keys - queries:
        # Everything before the first key after the prefix is as if nothing were masked there.
        prefix = min(prefix, keys)
        everyone = Block("full", 0, 0, queries, prefix)
        first = prefix - (keys - queries)
        if prefix == keys:
            return (everyone,)
        return (everyone, Block("causal", first, prefix, keys - prefix, keys - prefix))
    if queries > keys:
        raise ValueError(f"causal attention of {queries} queries needs as many keys, got {keys}")
    if window is None or window >= keys:
        past = keys - queries
        square = Block("causal", 0, past, queries, queries)
        return (square,) if past == 0 else (Block("full", 0, 0, queries, past), square)
    if queries == 1:  # decoding
        return (Block("full", 0, keys - window, 1, window),)
    return _plan_window(queries, keys - queries, window)


def _plan_window(queries: int, past: int, window: int) -> tuple[Block, ...]:
    """As `plan_blocks`, with a window smaller than past + queries.

    Args:
        past: keys before the first query's token.
    """
    blocks = []
    # Queries whose window would begin before key 0 see all keys up to their own.
    whole = min(queries, window - past) if past < window - 1 else 0
    if past and whole:
        blocks.append(Block("causal", 0, past, whole, whole))
        blocks.append(Block("full", 0, 0, whole, past))
    # The others in blocks of `window` tokens: row r of one sees the columns <= r of it and the
    # columns > r of the one before. The last row sees nothing of that one, so the edge is a
    # triangle of w - 1. Without a past the first queries are a square of that size too.
    count, rest = divmod(queries - whole, window)
    squares, first = (count, whole) if past or not whole else (count + 1, 0)
    if squares:
        blocks.append(Block("causal", first, past + first, window, window, squares, window))
    if count and window > 1:
        edge = past + whole - window + 1
        blocks.append(Block("anticausal", whole, edge, window - 1, window - 1, count, window))
    first = whole + count * window
    before = past + first - window
    if rest:
        blocks.append(Block("causal", first, past + first, rest, rest))
        blocks.append(Block("full", first, before + rest, rest, window - rest))
    if rest > 1:
        blocks.append(Block("anticausal", first, before + 1, rest - 1, rest - 1))
    return tuple(blocks)


def forward_blocks(
    backend: Backend,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    prefix: int = 0,
    distance_bias_HS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a backend under any of the masks above.

    Returns:
        out_BHTD in the dtype of the query, and lse_BHT, float32 (float64 for float64).
    """
    window = _effective_window(window, key_BGSD)
    if distance_bias_HS is not None:
        return backend.forward_biased(
            query_BHTD, key_BGSD, value_BGSD, distance_bias_HS, scale=scale, window=window
        )
    blocks = _blocks(backend, query_BHTD, key_BGSD, causal, window, prefix)
    if blocks is None:
        return backend.forward(
            query_BHTD, key_BGSD, value_BGSD, causal=causal, scale=scale, window=window
        )
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    out_BHTD = torch.zeros_like(query_BHTD, dtype=dtype)
    lse_BHT = out_BHTD.new_full(out_BHTD.shape[:-1], -torch.inf)
    for block in blocks:
        block_out, block_lse = backend.forward(
            _fold(query_BHTD, block, block.query, block.queries),
            _fold(key_BGSD, block, block.key, block.keys),
            _fold(value_BGSD, block, block.key, block.keys),
            causal=block.mask != "full",
            scale=scale,
        )
        merge_(
            _rows(out_BHTD, block, block.query, block.queries),
            _rows(lse_BHT[..., None], block, block.query, block.queries),
            _unfold(block_out, block),
            _unfold(block_lse[..., None], block),
        )
    return out_BHTD.to(query_BHTD.dtype), lse_BHT


def backward_blocks(
    backend: Backend,
    grad_out_BHTD: Tensor,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    prefix: int = 0,
    distance_bias_HS: Tensor | None = None,
    lse_grad_BHT: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias; arguments as in `Backend.backward`."""
    window = _effective_window(window, key_BGSD)
    inputs = (query_BHTD, key_BGSD, value_BGSD)
    options: dict[str, Any] = {"scale": scale, "window": window, "lse_grad_BHT": lse_grad_BHT}
    if distance_bias_HS is not None:
        return backend.backward_biased(
            grad_out_BHTD, *inputs, distance_bias_HS, out_BHTD, lse_BHT, **options
        )
    blocks = _blocks(backend, query_BHTD, key_BGSD, causal, window, prefix)
    if blocks is None:
        whole = backend.backward(
            grad_out_BHTD, *inputs, out_BHTD, lse_BHT, causal=causal, **options
        )
        return *whole, None
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    grads = tuple(torch.zeros_like(t, dtype=dtype) for t in inputs)
    for block in blocks:
        rows, columns = (block.query, block.queries), (block.key, block.keys)
        lse_grad = (
            None if lse_grad_BHT is None else _fold(lse_grad_BHT[..., None], block, *rows)[..., 0]
        )
        block_grads = backend.backward(
            _fold(grad_out_BHTD, block, *rows),
            _fold(query_BHTD, block, *rows),
            _fold(key_BGSD, block, *columns),
            _fold(value_BGSD, block, *columns),
            _fold(out_BHTD, block, *rows),
            _fold(lse_BHT[..., None], block, *rows)[..., 0],
            causal=block.mask != "full",
            scale=scale,
            lse_grad_BHT=lse_grad,
        )
        for total, part, place in zip(grads, block_grads, (rows, columns, columns), strict=True):
            _rows(total, block, *place).add_(_unfold(part, block))
    grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (g.to(query_BHTD.dtype) for g in grads)
    return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD, None


def merge_(
    out_BHTD: Tensor, lse_BHT1: Tensor, other_out_BHTD: Tensor, other_lse_BHT1: Tensor
) -> None:
    """Merges, in place, attention over other keys into `out_BHTD` and `lse_BHT1`.

    A side that saw no key has an LSE of -inf and weighs nothing; one of the two must have seen one.
    """
    merged_lse_BHT1 = torch.logaddexp(lse_BHT1, other_lse_BHT1)
    out_BHTD.mul_((lse_BHT1 - merged_lse_BHT1).exp_())
    out_BHTD.add_(other_out_BHTD * (other_lse_BHT1 - merged_lse_BHT1).exp_())
    lse_BHT1.copy_(merged_lse_BHT1)


def _effective_window(window: int | None, key_BGSD: Tensor) -> int | None:
    return None if window is None or window >= key_BGSD.shape[2] else window


def _blocks(
    backend: Backend,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    causal: bool,
    window: int | None,
    prefix: int,
) -> tuple[Block, ...] | None:
    """The plan, or None where one call of the backend does it."""
    square = query_BHTD.shape[2] == key_BGSD.shape[2]
    if not causal or (window is not None and backend.native_window and square):
        return None
    blocks = plan_blocks(query_BHTD.shape[2], key_BGSD.shape[2], window, prefix)
    whole = len(blocks) == 1 and blocks[0].repeats == 1 and blocks[0].mask == "causal"
    return None if whole else blocks


def _rows(tensor_BHTD: Tensor, block: Block, start: int, length: int) -> Tensor:
    """View [B, N, H, length, D] of the rows of a block."""
    region = tensor_BHTD.narrow(2, start, (block.repeats - 1) * block.stride + length)
    windows_BHNDT = region.unfold(2, length, max(block.stride, 1))
    return windows_BHNDT.permute(0, 2, 1, 4, 3)


def _fold(tensor_BHTD: Tensor, block: Block, start: int, length: int) -> Tensor:
    """[B * N, H, length, D]: a view where the strides allow it. Reversed if anticausal."""
    folded = _rows(tensor_BHTD, block, start, length).flatten(0, 1)
    return folded.flip(-2) if block.mask == "anticausal" else folded


def _unfold(tensor_BHTD: Tensor, block: Block) -> Tensor:
    """The inverse of `_fold`, shaped as `_rows`."""
    if block.mask == "anticausal":
        tensor_BHTD = tensor_BHTD.flip(-2)
    return tensor_BHTD.unflatten(0, (-1, block.repeats))
