"""Attention over a sequence split across context-parallel ranks, keys travelling in a ring (p2p).

A rank holds the chunks r and 2 * cp - 1 - r of the sequence (`context_parallel`), and in each of cp
steps the keys and values of one rank, while those of the next are on their way. Its own are a
causal square. Of an earlier rank all queries see the first chunk, and none the last. Of a later
rank the queries of the last chunk see everything, and those of the first nothing. The slot joins
the softmax after the last merge. In the backward pass each step gets the merged output and LSE, so
it yields its exact share of the gradient, and dk and dv travel with k and v.

Shapes: B batch, H query heads, G key/value groups, s tokens of this rank, D head dim.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work, batch_isend_irecv, irecv, isend
from torch.distributed import get_process_group_ranks as ranks_of

from megasink.attention import AttentionOutput, AttentionRequest
from megasink.attention.call import Arriving, AttentionCall, BackwardTensors, Results
from megasink.attention.gate_kernels import (
    BeforeBackward,
    GateKernels,
    choose_gate_kernels,
    gate_kernels_named,
)
from megasink.attention.kernels import Backend, backend_named, choose_backend
from megasink.attention.kernels.cuda import at_runtime
from megasink.attention.layout import repeat_groups, row_dot, statistics_dtype
from megasink.attention.mask_blocks import merge_
from megasink.attention.masked import backward_masked, forward_masked
from megasink.attention.variants import variants


def ring_problems(options: Any) -> Iterator[str]:
    """Yield the flags among a model's options that the ring does not support."""
    if options.window_size is not None:
        yield "--window-size"
    if options.prefix_lm_tokens:
        yield "--prefix-lm-tokens"
    if options.attention_bias_type != "none":
        yield f"--attention-bias-type {options.attention_bias_type}"
    if options.attention_similarity != "softmax":
        yield f"--attention-similarity {options.attention_similarity}"
    name = options.attention_variant
    if any(record.name == name and record.attend is not None for record in variants()):
        yield f"--attention-variant {name}"


class Ring:
    """`attention` and `slot_attention` over the ranks of a group, from a rank's own tokens.

    Attributes:
        first_value_BG1D: The value of the first token of the sequence, after `attention`.
    """

    def __init__(self, group: ProcessGroup, options: Any):
        if problems := ", ".join(ring_problems(options)):
            raise ValueError(f"cp_comm_type 'p2p' rejects {problems}: use 'all_gather' or 'a2a'")
        self.group = group
        self.first_value_BG1D: Tensor | None = None

    def attention(
        self, query_BHsD: Tensor, *keys_and_values: Tensor, with_gate: bool, **options: Any
    ) -> AttentionOutput:
        """Return attention over all keys; the gate is 1 minus the weight of the first one."""
        call = _call(query_BHsD, with_gate, **options)
        tensors = query_BHsD, *keys_and_values
        out_BHsD, lse_BHs, _ = _Ring.apply(*tensors, None, None, self.group, call)
        if not with_gate:
            return AttentionOutput(out_BHsD, lse_BHs, None)
        first_BG1D, self.first_value_BG1D = _FirstToken.apply(*keys_and_values, self.group)
        first_BH1D = repeat_groups(first_BG1D, query_BHsD.shape[1])
        weight_BHs = (row_dot(query_BHsD, first_BH1D) * call.scale - lse_BHs).exp()
        return AttentionOutput(out_BHsD, lse_BHs, (1.0 - weight_BHs).clamp_min(0.0))

    def slot_attention(
        self, query_BHsD: Tensor, *keys_values_and_slot: Tensor | None, **options: Any
    ) -> AttentionOutput:
        """Return attention over all keys and a slot, whose weight is 1 minus the gate."""
        call = _call(query_BHsD, True, **options)
        found = _Ring.apply(query_BHsD, *keys_values_and_slot, self.group, call)
        return AttentionOutput(*found)


def _call(
    query_BHsD: Tensor,
    needs_gate_gradient: bool,
    *,
    scale: float | None = None,
    backend: str = "auto",
    **mask: Any,
) -> AttentionCall:
    if asked := ", ".join(name for name, value in mask.items() if value):
        raise ValueError(f"cp_comm_type 'p2p' does not support {asked}: use 'all_gather' or 'a2a'")
    scale = query_BHsD.shape[-1] ** -0.5 if scale is None else scale
    return AttentionCall(None, scale, backend=backend, needs_gate_gradient=needs_gate_gradient)


def _kernels(query_BHsD: Tensor, call: AttentionCall) -> tuple[Backend, GateKernels]:
    request = AttentionRequest(
        query_BHsD.device.type,
        query_BHsD.dtype,
        query_BHsD.shape[-1],
        needs_gate_gradient=call.needs_gate_gradient,
    )
    request = at_runtime(request, query_BHsD.device.index)
    kernel = backend_named(choose_backend(request, call.backend).name)
    return kernel, gate_kernels_named(choose_gate_kernels(request, call.backend).name)


class _Neighbours:
    """Sends tensors to the next rank of a group, and receives those of the previous one."""

    def __init__(self, group: ProcessGroup):
        ranks, rank = ranks_of(group), group.rank()
        self._group, self._next = group, ranks[(rank + 1) % len(ranks)]
        self._previous = ranks[rank - 1]

    def exchange(self, sent: Tensor, tag: int) -> tuple[Tensor, list[Work], Tensor]:
        """Start an exchange, to be passed to `wait`."""
        received = torch.empty_like(sent)
        works = batch_isend_irecv(
            [
                P2POp(isend, sent, self._next, self._group, tag),
                P2POp(irecv, received, self._previous, self._group, tag),
            ]
        )
        return received, works, sent  # whose memory is needed until it has arrived

    @staticmethod
    def wait(exchange: tuple[Tensor, list[Work], Tensor]) -> Tensor:
        """Return what the previous rank sent."""
        received, works, _ = exchange
        for work in works:
            work.wait()
        return received


def _steps(group: ProcessGroup, tokens: int) -> Iterator[tuple[int, int, bool, bool]]:
    """Yield for the keys of each rank, as they come: first query, end of keys, causal, is last."""
    ranks, rank, half = group.size(), group.rank(), tokens // 2
    for step in range(ranks):
        is_last = step + 1 == ranks
        if step == 0:
            yield 0, tokens, True, is_last
        elif step <= rank:  # an earlier rank's, rank - step
            yield 0, half, False, is_last
        else:
            yield half, tokens, False, is_last


class _Ring(torch.autograd.Function):
    """Output, LSE and gate over the keys of all ranks and a slot, with the gradients of all."""

    @staticmethod
    def forward(
        ctx: Any,
        query_BHsD: Tensor,
        key_BGsD: Tensor,
        value_BGsD: Tensor,
        slot_logit: Tensor | None,
        slot_value: Tensor | None,
        group: ProcessGroup,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        kernel, gates = _kernels(query_BHsD, call)
        neighbours, tokens = _Neighbours(group), query_BHsD.shape[2]
        own = both = torch.stack((key_BGsD, value_BGsD))
        out_BHsD = torch.zeros_like(query_BHsD, dtype=statistics_dtype(query_BHsD.dtype))
        lse_BHs = out_BHsD.new_full(out_BHsD.shape[:-1], -torch.inf)
        for first, end, causal, is_last in _steps(group, tokens):
            coming = None if is_last else neighbours.exchange(both, 0)
            key, value = both[:, :, :, :end]
            block_out, block_lse = forward_masked(
                kernel, query_BHsD[:, :, first:], key, value, call._replace(causal=causal)
            )
            merge_(
                out_BHsD[:, :, first:], lse_BHs[:, :, first:, None], block_out, block_lse[..., None]
            )
            both = both if coming is None else neighbours.wait(coming)
        if slot_logit is None:
            nothing = lse_BHs.new_empty(0)
            results = Results(out_BHsD.to(query_BHsD.dtype), lse_BHs, nothing, nothing)
        else:
            results = gates.slot_forward(query_BHsD, out_BHsD, lse_BHs, slot_logit, slot_value)
        ctx.save_for_backward(query_BHsD, own, slot_logit, slot_value, *results)
        ctx.ring = group, call
        return results[:3]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        query_BHsD, both, slot_logit, slot_value, *results = ctx.saved_tensors
        group, call = ctx.ring
        kernel, gates = _kernels(query_BHsD, call)
        grad_out, grad_lse, grad_gate = arriving
        grad_out = torch.zeros_like(results[0]) if grad_out is None else grad_out
        if gates.borrows:  # they write into both
            grad_out, results[0] = grad_out.clone(), results[0].clone()
        given = Arriving(grad_out, grad_lse, grad_gate if slot_logit is not None else None)
        inject = not kernel.takes_lse_gradient
        slot = slot_logit, slot_value
        with gates.slot_backward(given, Results(*results), *slot, inject=inject) as before:
            grads = _keys_backward(kernel, before, query_BHsD, both, results[1], group, call)
        return *grads, before.logit_grad, before.value_grad, None, None


def _keys_backward(
    kernel: Backend,
    before: BeforeBackward,
    query_BHsD: Tensor,
    both: Tensor,
    lse_BHs: Tensor,
    group: ProcessGroup,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a rank's queries, keys and values; `both` are its keys and values."""
    neighbours, tokens, dtype = _Neighbours(group), query_BHsD.shape[2], lse_BHs.dtype
    query_grad = torch.zeros_like(query_BHsD, dtype=dtype)
    both_grad = torch.zeros_like(both, dtype=dtype)
    coming = grads_coming = None
    for first, end, causal, is_last in _steps(group, tokens):
        coming = None if is_last else neighbours.exchange(both, 0)
        rows = (before.grad_out_BHTD, query_BHsD, before.out_BHTD, lse_BHs)
        grad_out, query, out, lse = (tensor[:, :, first:] for tensor in rows)
        lse_grad = None if before.lse_grad_BHT is None else before.lse_grad_BHT[:, :, first:]
        key, value = both[:, :, :, :end]
        tensors = BackwardTensors(grad_out, query, key, value, out, lse.contiguous(), lse_grad)
        grads = backward_masked(kernel, tensors, call._replace(causal=causal))
        query_grad[:, :, first:] += grads.query_BHTD
        if grads_coming is not None:  # what the ranks before this one added up for these keys
            both_grad = neighbours.wait(grads_coming)
        both_grad[0, :, :, :end] += grads.key_BGSD
        both_grad[1, :, :, :end] += grads.value_BGSD
        grads_coming = neighbours.exchange(both_grad, 1)
        both = both if coming is None else neighbours.wait(coming)
    assert grads_coming is not None
    key_grad, value_grad = neighbours.wait(grads_coming).to(both.dtype)
    return query_grad.to(query_BHsD.dtype), key_grad, value_grad


class _FirstToken(torch.autograd.Function):
    """Key and value of the sequence's first token, on every rank; the value has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, key_BGsD: Tensor, value_BGsD: Tensor, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.shape = group, key_BGsD.shape
        both = torch.stack((key_BGsD[:, :, :1], value_BGsD[:, :, :1]))
        torch.distributed.broadcast(both, src=ranks_of(group)[0], group=group)
        key_BG1D, value_BG1D = both[0], both[1]
        ctx.mark_non_differentiable(value_BG1D)
        return key_BG1D, value_BG1D

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BG1D: Tensor, _: Any) -> tuple[Tensor, None, None]:
        total = grad_BG1D.to(statistics_dtype(grad_BG1D.dtype)).contiguous()
        torch.distributed.all_reduce(total, group=ctx.group)
        grad_BGsD = grad_BG1D.new_zeros(ctx.shape)
        if ctx.group.rank() == 0:
            grad_BGsD[:, :, :1] = total
        return grad_BGsD, None, None
