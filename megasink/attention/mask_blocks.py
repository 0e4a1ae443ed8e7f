"""Masks that kernels lack, decomposed into blocks that they support.

A kernel supports causal squares and unmasked rectangles. Blocks over different keys are merged by
their log-sum-exps, and the backward of each block, given the merged output and LSE, is its exact
share of the gradient (docs/maths.md). Sliding windows, prefixes and bottom-right causal rectangles
become lists of blocks on every backend; no S x S matrix or mask is materialized. A distance bias
requires a backend that applies it together with the whole causal mask.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim; N blocks of the same size,
folded into the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.kernels.backend import Backend


class Block(NamedTuple):
    """`repeats` blocks of the same size, `stride` tokens apart, in one kernel call."""

    # "full", "causal" (row r sees columns <= r) or "anticausal" (columns >= r: the edge of a
    # sliding window, which is the causal mask of the reversed block).
    mask: str
    # query, key: First query and first key.
    query: int
    key: int
    # queries, keys: Size of a block.
    queries: int
    keys: int
    repeats: int = 1
    stride: int = 0

    def queries_of(self, tensor_BHTD: Tensor) -> Tensor:
        """Return a view [B, N, H, queries, D] of the rows of the blocks."""
        return self._view(tensor_BHTD, self.query, self.queries)

    def keys_of(self, tensor_BGSD: Tensor) -> Tensor:
        """Return a view [B, N, G, keys, D] of the columns of the blocks."""
        return self._view(tensor_BGSD, self.key, self.keys)

    def _view(self, tensor_BHTD: Tensor, start: int, length: int) -> Tensor:
        region = tensor_BHTD.narrow(2, start, (self.repeats - 1) * self.stride + length)
        windows_BHNDT = region.unfold(2, length, max(self.stride, 1))
        return windows_BHNDT.permute(0, 2, 1, 4, 3)

    def fold_queries(self, tensor_BHTD: Tensor) -> Tensor:
        """Fold the blocks into [B * N, H, queries, D], as a view if the strides allow it."""
        return self._reversed(self.queries_of(tensor_BHTD).flatten(0, 1))

    def fold_keys(self, tensor_BGSD: Tensor) -> Tensor:
        """Do the same as `fold_queries`, for keys."""
        return self._reversed(self.keys_of(tensor_BGSD).flatten(0, 1))

    def unfold(self, tensor_BHTD: Tensor) -> Tensor:
        """Reshape a kernel's result for folded tensors to match `queries_of` or `keys_of`."""
        return self._reversed(tensor_BHTD).unflatten(0, (-1, self.repeats))

    def _reversed(self, folded_BHTD: Tensor) -> Tensor:
        """Reverse the rows of an anticausal block, which makes its mask causal."""
        return folded_BHTD.flip(-2) if self.mask == "anticausal" else folded_BHTD


def plan_blocks(
    queries: int, keys: int, window: int | None = None, prefix: int = 0
) -> tuple[Block, ...]:
    """Decompose the bottom-right causal mask into disjoint blocks; a prefix or a window, not both.

    T <= S; with a prefix also T = S + 1, where key 0 was removed as the slot.
    """
    if prefix and prefix > keys - queries:
        # The prefix keys are unmasked for every query.
        prefix = min(prefix, keys)
        everyone = Block("full", 0, 0, queries, prefix)
        first = prefix - (keys - queries)
        if prefix == keys:
            return (everyone,)
        return (everyone, Block("causal", first, prefix, keys - prefix, keys - prefix))
    if queries > keys:
        raise ValueError(f"{queries} causal queries need at least as many keys, got {keys}")
    if window is None or window >= keys:
        past = keys - queries
        square = Block("causal", 0, past, queries, queries)
        return (square,) if past == 0 else (Block("full", 0, 0, queries, past), square)
    if queries == 1:  # decoding
        return (Block("full", 0, keys - window, 1, window),)
    return _plan_window(queries, keys - queries, window)


def _plan_window(queries: int, past: int, window: int) -> tuple[Block, ...]:
    """Implement `plan_blocks` for a window smaller than past + queries."""
    blocks = []
    # Queries whose window would begin before key 0 see all keys up to their own.
    complete = min(queries, window - past) if past < window - 1 else 0
    if past and complete:
        blocks.append(Block("causal", 0, past, complete, complete))
        blocks.append(Block("full", 0, 0, complete, past))
    # The others form blocks of `window` tokens: row r sees columns <= r of its own block and
    # columns > r of the previous one. The last row sees none of the previous block, so the edge is
    # a triangle of size w - 1. Without a past the first queries are also a square of size w.
    count, rest = divmod(queries - complete, window)
    squares, first = (count, complete) if past or not complete else (count + 1, 0)
    if squares:
        blocks.append(Block("causal", first, past + first, window, window, squares, window))
    if count and window > 1:
        edge = past + complete - window + 1
        blocks.append(Block("anticausal", complete, edge, window - 1, window - 1, count, window))
    first = complete + count * window
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
    """Run a backend, block by block, under a causal mask; return out and lse (32 or 64 bits)."""
    blocks = plan_blocks(query_BHTD.shape[2], key_BGSD.shape[2], call.window, call.prefix)
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    out_BHTD = torch.zeros_like(query_BHTD[..., : value_BGSD.shape[-1]], dtype=dtype)
    lse_BHT = out_BHTD.new_full(out_BHTD.shape[:-1], -torch.inf)
    for block in blocks:
        block_out, block_lse = backend.forward(
            block.fold_queries(query_BHTD),
            block.fold_keys(key_BGSD),
            block.fold_keys(value_BGSD),
            call._replace(causal=block.mask != "full", window=None),
        )
        merge_(
            block.queries_of(out_BHTD),
            block.queries_of(lse_BHT[..., None]),
            block.unfold(block_out),
            block.unfold(block_lse[..., None]),
        )
    return out_BHTD.to(query_BHTD.dtype), lse_BHT


def backward_blocks(backend: Backend, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
    """Compute the gradients of `forward_blocks`; see `Backend.backward`."""
    grad_out_BHTD, query_BHTD, key_BGSD, value_BGSD, out_BHTD, lse_BHT, lse_grad_BHT, _ = tensors
    blocks = plan_blocks(query_BHTD.shape[2], key_BGSD.shape[2], call.window, call.prefix)
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
        alone = call._replace(causal=block.mask != "full", window=None)
        grads = backend.backward(folded, alone)
        block.queries_of(grad_query_BHTD).add_(block.unfold(grads.query_BHTD))
        block.keys_of(grad_key_BGSD).add_(block.unfold(grads.key_BGSD))
        block.keys_of(grad_value_BGSD).add_(block.unfold(grads.value_BGSD))
    dtype = query_BHTD.dtype
    return Gradients(grad_query_BHTD.to(dtype), grad_key_BGSD.to(dtype), grad_value_BGSD.to(dtype))


def merge_(
    out_BHTD: Tensor, lse_BHT1: Tensor, other_out_BHTD: Tensor, other_lse_BHT1: Tensor
) -> None:
    """Merge attention over other keys into `out_BHTD` and `lse_BHT1`, in place.

    A side that saw no key has LSE -inf and weight 0; at least one side must have seen a key.
    """
    merged_lse_BHT1 = torch.logaddexp(lse_BHT1, other_lse_BHT1)
    out_BHTD.mul_((lse_BHT1 - merged_lse_BHT1).exp_())
    out_BHTD.add_(other_out_BHTD * (other_lse_BHT1 - merged_lse_BHT1).exp_())
    lse_BHT1.copy_(merged_lse_BHT1)
