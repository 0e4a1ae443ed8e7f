"""Attention over a sequence split across the ranks of a context-parallel group.

Megatron splits every sequence into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r
(``megatron/core/utils.py:get_batch_on_this_cp_rank``), which balances the work of the ranks under
the causal mask. Three modes are supported, named as in ``--cp-comm-type``:

all_gather: every rank gathers the keys and values of the whole sequence, and its two query chunks
attend to them. Each chunk is the bottom of a causal square, so its log-sum-exps are complete.
a2a: every rank exchanges its tokens of all heads for all tokens of its share of the heads.
p2p, in ``ring_attention.py``: keys and values travel from rank to rank.

A row of packed documents is split like any sequence, wherever its documents end: a chunk attends to
the keys of its documents, the first of which may have begun on another rank.

Shapes: s tokens of this rank, c = s / 2 of one chunk, S = cp * s of the sequence, B batch, H query
heads and G key/value groups of this tensor-parallel rank, N any of these, D head dim (X of key and
value together), T queries.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# (query_BHTD, key_BGSD, value_BGSD) -> output_BHTD and gate_BHT or None; the last query is aligned
# with the last key.
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend_to_gathered_keys(
    attend: Attend, query_sBHD: Tensor, key_sBGD: Tensor, value_sBGD: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Attend from this rank's tokens to the whole sequence, for all heads (all_gather).

    Return the output [s, B, H, D] and the gate [B, H, s], or None if `attend` returns no gate.
    """
    kept: list[Tensor] = []
    views = _GatherKeys.apply(key_sBGD, value_sBGD, group, kept)
    first_key, first_value, last_key, last_value = views
    first_query, last_query = query_sBHD.chunk(2)
    first_out, first_gate = _attend(attend, first_query, first_key, first_value)
    last_out, last_gate = _attend(attend, last_query, last_key, last_value)
    gate = None
    if first_gate is not None and last_gate is not None:
        gate = torch.cat((first_gate, last_gate), dim=2)
    out = torch.cat((first_out, last_out))
    if torch.is_grad_enabled() and (key_sBGD.requires_grad or value_sBGD.requires_grad):
        out, gate = _GatherAgain.apply(out, gate, *kept, group)
    return out, gate


def attend_with_scattered_heads(
    attend: Attend, query_sBHD: Tensor, key_sBGD: Tensor, value_sBGD: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor | None]:
    """Attend over the whole sequence for this rank's share of the heads (a2a).

    `attend` receives share r of cp consecutive shares of heads and groups; cp must divide both.
    Return the same as `attend_to_gathered_keys`.
    """
    ranks = group.size()
    tensors = (query_sBHD, key_sBGD, value_sBGD)
    heads = [tensor.shape[2] // ranks for tensor in tensors]
    # One exchange for all three: per rank the queries, keys and values of its heads.
    shares = torch.cat([t.unflatten(2, (ranks, -1)) for t in tensors], dim=3)
    gathered_SBND = _ScatterHeads.apply(shares.flatten(2, 3), group)
    out_SBHD, gate_BHS = _attend(attend, *gathered_SBND.split(heads, dim=2))
    out_sBHD = _GatherHeads.apply(out_SBHD, group)
    if gate_BHS is None:
        return out_sBHD, None
    gate_sBH1 = _GatherHeads.apply(gate_BHS.permute(2, 0, 1).unsqueeze(-1), group)
    return out_sBHD, gate_sBH1.squeeze(-1).permute(1, 2, 0)


def _attend(attend: Attend, *tensors_SBND: Tensor) -> tuple[Tensor, Tensor | None]:
    """Call `attend` on query, key and value in Megatron's layout; return [T, B, H, D]."""
    out_BHTD, gate_BHT = attend(*(x.permute(1, 2, 0, 3) for x in tensors_SBND))
    return out_BHTD.permute(2, 0, 1, 3), gate_BHT


class _GatherKeys(torch.autograd.Function):
    """Keys and values of the sequence up to the end of each of this rank's two chunks.

    Returns four views of one buffer; the backward sums their gradients and reduce-scatters the sum.
    Adds to `kept` what this rank sends, and the buffer.
    """

    @staticmethod
    def forward(
        ctx: Any, key_sBGD: Tensor, value_sBGD: Tensor, group: ProcessGroup, kept: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.group, ctx.widths = group, (key_sBGD.shape[-1], value_sBGD.shape[-1])
        ranks, rank, chunk = group.size(), group.rank(), key_sBGD.shape[0] // 2
        both_sBGX = torch.cat((key_sBGD, value_sBGD), dim=-1)
        ctx.gathered = _gathered(both_sBGX, group)
        kept += both_sBGX, ctx.gathered
        key_SBGD, value_SBGD = ctx.gathered.split(ctx.widths, dim=-1)
        ctx.ends = (rank + 1) * chunk, (2 * ranks - rank) * chunk
        first, last = ctx.ends
        return key_SBGD[:first], value_SBGD[:first], key_SBGD[:last], value_SBGD[:last]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, first_key: Tensor, first_value: Tensor, last_key: Tensor, last_value: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        ctx.gathered.untyped_storage().resize_(0)  # both chunks have read it
        group, (first, last), ranks = ctx.group, ctx.ends, ctx.group.size()
        total = last_key.new_empty(ctx.gathered.shape)
        for grad, of_first, of_last in zip(
            total.split(ctx.widths, dim=-1),
            (first_key, first_value),
            (last_key, last_value),
            strict=True,
        ):
            grad[:first] = of_last[:first] + of_first
            grad[first:last] = of_last[first:]
            grad[last:] = 0.0
        mine_sBGX = total.new_empty(len(total) // ranks, *total.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine_sBGX, in_rank_order(total, ranks), group=group)
        grad_key_sBGD, grad_value_sBGD = mine_sBGX.split(ctx.widths, dim=-1)
        return grad_key_sBGD, grad_value_sBGD, None, None


class _GatherAgain(torch.autograd.Function):
    """Frees the keys and values of the sequence; gathers them again before attention's backward.

    What attention saves are views of one buffer, 2 S G D numbers in each layer. Its storage has no
    memory from here to the backward, in which it gets the same numbers, as TransformerEngine does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out_sBHD: Tensor,
        gate_BHs: Tensor | None,
        both_sBGX: Tensor,
        gathered_SBGX: Tensor,
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(both_sBGX)
        storage = gathered_SBGX.untyped_storage()
        ctx.gathered, ctx.bytes, ctx.group = gathered_SBGX, storage.nbytes(), group
        storage.resize_(0)
        return out_sBHD.view_as(out_sBHD), None if gate_BHs is None else gate_BHs.view_as(gate_BHs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.gathered.untyped_storage().resize_(ctx.bytes)
        # Not through its version counter: to autograd these are the numbers that were saved.
        (both_sBGX,) = ctx.saved_tensors
        ctx.gathered.data.copy_(_gathered(both_sBGX, ctx.group))
        return *grads, None, None, None


def _gathered(own_sBND: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, [S, B, N, D] in sequence order."""
    gathered = own_sBND.new_empty(group.size() * len(own_sBND), *own_sBND.shape[1:])
    torch.distributed.all_gather_into_tensor(gathered, own_sBND, group=group)
    return in_sequence_order(gathered, group.size())


class _ScatterHeads(torch.autograd.Function):
    """[s, B, N, D] of all heads -> [S, B, N / cp, D] of the whole sequence, in sequence order."""

    @staticmethod
    def forward(ctx: Any, x_sBND: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_heads(x_sBND, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_heads(grad, ctx.group), None


class _GatherHeads(torch.autograd.Function):
    """The inverse of `_ScatterHeads`, and therefore its backward."""

    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather_heads(x_SBND, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_heads(grad, ctx.group), None


def _scatter_heads(x_sBND: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    sent = x_sBND.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return in_sequence_order(received.flatten(0, 1), ranks)


def _gather_heads(x_SBND: Tensor, group: ProcessGroup) -> Tensor:
    ranks = group.size()
    sent = in_rank_order(x_SBND, ranks).unflatten(0, (ranks, -1))
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).flatten(2, 3)


def own_ranges(tokens: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, stop) of a sequence of S tokens that a rank holds."""
    if ranks == 1:
        return ((0, tokens),)
    chunk, last = tokens // (2 * ranks), 2 * ranks - 1 - rank
    return ((rank * chunk, (rank + 1) * chunk), (last * chunk, (last + 1) * chunk))


def own_chunks(tokens_of_all: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """Return the tokens of a rank from a tensor over the whole sequence."""
    if ranks == 1:
        return tokens_of_all
    ranges = own_ranges(tokens_of_all.shape[dim], ranks, rank)
    return torch.cat([tokens_of_all.narrow(dim, a, b - a) for a, b in ranges], dim)


def in_sequence_order(ranked: Tensor, ranks: int) -> Tensor:
    """Reorder [S, ...] from rank order (tokens of rank 0, rank 1, ...) to sequence order."""
    chunks = ranked.unflatten(0, (ranks, 2, -1))
    return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)


def in_rank_order(tokens: Tensor, ranks: int) -> Tensor:
    """Invert `in_sequence_order`; the result is contiguous."""
    first, last = tokens.unflatten(0, (2 * ranks, -1)).chunk(2)
    return torch.stack((first, last.flip(0)), dim=1).flatten(0, 2).contiguous()
