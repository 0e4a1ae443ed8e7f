"""Masks that kernels do not know, as lists of blocks that they do.

A kernel answers causal squares and unmasked rectangles. A softmax over more keys is the merge of
blocks by their log-sum-exps, and the backward of each block, handed the merged output and LSE, is
its exact share of the gradient (docs/maths.md). Sliding windows, prefixes and bottom-right causal
rectangles become such lists, on every backend, and nothing is S x S, masks included. A bias by
distance is for backends that take the whole causal mask with it.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim; N blocks of one size,
folded into the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megasink.attention.backends.base import Backend
from megasink.attention.call import AttentionCall, BackwardTensors, Gradients


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

    def queries_of(self, tensor_BHTD: Tensor) -> Tensor:
        """View [B, N, H, queries, D] of the rows of the blocks."""
        return self._view(tensor_BHTD, self.query, self.queries)

    def keys_of(self, tensor_BGSD: Tensor) -> Tensor:
        """View [B, N, G, keys, D] of the columns of the blocks."""
        return self._view(tensor_BGSD, self.key, self.keys)

    def _view(self, tensor_BHTD: Tensor, start: int, length: int) -> Tensor:
        region = tensor_BHTD.narrow(2, start, (self.repeats - 1) * self.stride + length)
        windows_BHNDT = region.unfold(2, length, max(self.stride, 1))
        return windows_BHNDT.permute(0, 2, 1, 4, 3)

    def fold_queries(self, tensor_BHTD: Tensor) -> Tensor:
        """[B * N, H, queries, D], as a kernel takes it: a view where the strides allow it."""
        return self._reversed(self.queries_of(tensor_BHTD).flatten(0, 1))

    def fold_keys(self, tensor_BGSD: Tensor) -> Tensor:
        """As `fold_queries`, for keys."""
        return self._reversed(self.keys_of(tensor_BGSD).flatten(0, 1))

    def unfold(self, tensor_BHTD: Tensor) -> Tensor:
        """What a kernel returned for folded tensors, shaped as `queries_of` or `keys_of`."""
        return self._reversed(tensor_BHTD).unflatten(0, (-1, self.repeats))

    def _reversed(self, folded_BHTD: Tensor) -> Tensor:
        """Rows from the last to the first where the mask is anticausal, so that it is causal."""
        return folded_BHTD.flip(-2) if self.mask == "anticausal" else folded_BHTD


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
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Attention of a backend under any of the masks above.

    Returns:
        out_BHTD in the dtype of the query, and lse_BHT, float32 (float64 for float64).
    """
    call, blocks = _blocks(backend, query_BHTD, key_BGSD, call)
    if blocks is None:
        return backend.forward(query_BHTD, key_BGSD, value_BGSD, call)
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    out_BHTD = torch.zeros_like(query_BHTD, dtype=dtype)
    lse_BHT = out_BHTD.new_full(out_BHTD.shape[:-1], -torch.inf)
    for block in blocks:
        block_out, block_lse = backend.forward(
            block.fold_queries(query_BHTD),
            block.fold_keys(key_BGSD),
            block.fold_keys(value_BGSD),
            call._replace(causal=block.mask != "full"),
        )
        merge_(
            block.queries_of(out_BHTD),
            block.queries_of(lse_BHT[..., None]),
            block.unfold(block_out),
            block.unfold(block_lse[..., None]),
        )
    return out_BHTD.to(query_BHTD.dtype), lse_BHT


def backward_blocks(backend: Backend, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
    """Gradients of `forward_blocks`; see `Backend.backward`."""
    grad_out_BHTD, query_BHTD, key_BGSD, value_BGSD, out_BHTD, lse_BHT, lse_grad_BHT = tensors
    call, blocks = _blocks(backend, query_BHTD, key_BGSD, call)
    if blocks is None:
        return backend.backward(tensors, call)
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    inputs = (query_BHTD, key_BGSD, value_BGSD)
    grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (
        torch.zeros_like(tensor, dtype=dtype) for tensor in inputs
    )
    for block in blocks:
        lse_grad = None
        if lse_grad_BHT is not None:
            lse_grad = block.fold_queries(lse_grad_BHT[..., None])[..., 0]
        folded = BackwardTensors(
            block.fold_queries(grad_out_BHTD),
            block.fold_queries(query_BHTD),
            block.fold_keys(key_BGSD),
            block.fold_keys(value_BGSD),
            block.fold_queries(out_BHTD),
            block.fold_queries(lse_BHT[..., None])[..., 0],
            lse_grad,
        )
        grads = backend.backward(folded, call._replace(causal=block.mask != "full"))
        block.queries_of(grad_query_BHTD).add_(block.unfold(grads.query_BHTD))
        block.keys_of(grad_key_BGSD).add_(block.unfold(grads.key_BGSD))
        block.keys_of(grad_value_BGSD).add_(block.unfold(grads.value_BGSD))
    dtype = query_BHTD.dtype
    return Gradients(grad_query_BHTD.to(dtype), grad_key_BGSD.to(dtype), grad_value_BGSD.to(dtype))


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


def _blocks(
    backend: Backend, query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall
) -> tuple[AttentionCall, tuple[Block, ...] | None]:
    """What the backend is called with, and the plan, or None where one call of it does it."""
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    window = call.window
    if window is not None and window >= keys:
        window, call = None, call._replace(window=None)
    if not call.causal or call.distance_bias_HS is not None:
        return call, None
    if window is not None and backend.native_window and queries == keys:
        return call, None
    blocks = plan_blocks(queries, keys, window, call.prefix)
    if len(blocks) == 1 and blocks[0].repeats == 1 and blocks[0].mask == "causal":
        return call, None
    return (call if window is None else call._replace(window=None)), blocks
