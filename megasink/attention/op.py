"""The op behind every variant: attention over real keys plus one sink slot (docs/maths.md).

An attention kernel (`kernels`) computes the keys; gate kernels (`gate_kernels`) add the slot to
its result, and take the slot's gradients before its backward.

Arguments are the fields of `Slotted` and `AttentionCall`, as a custom op (custom_op.py) takes them.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim; 1 for a dimension
that broadcasts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megasink.attention.call import (
    Arriving,
    AttentionCall,
    BackwardTensors,
    Gradients,
    Results,
    Slot,
    Slotted,
    from_op,
)
from megasink.attention.gate_kernels import OWN, choose_gate_kernels, gate_kernels_named
from megasink.attention.gate_kernels.protocol import BeforeBackward, GateKernels
from megasink.attention.kernels import backend_named, choose_backend, remembered
from megasink.attention.kernels.backend import AttentionRequest, Backend, compute_capability
from megasink.attention.layout import in_order_of, without_autocast
from megasink.attention.masked import backward_masked, forward_masked, one_call


def run_forward(ctx: Any, *arguments: Any) -> Results:
    """Run the forward on fields of `Slotted` and `AttentionCall`; `ctx` saves for the backward."""
    slotted, call = from_op(arguments, Slotted, AttentionCall)
    slotted = _with_rows(slotted)
    query_BHTD, key_BGSD, value_BGSD, slot_logit, slot_value = slotted
    kernel, gates, own_sink = _kernels(slotted, call)
    with without_autocast():
        if call.slot == Slot.FIRST_KEY:
            from megasink.attention.first_key import first_key, without_first_key

            first, rows = first_key(query_BHTD, key_BGSD, value_BGSD, call), None
            if first.alone < query_BHTD.shape[2]:
                rows = forward_masked(
                    kernel,
                    query_BHTD[:, :, first.alone :],
                    key_BGSD[:, :, first.skipped :],
                    value_BGSD[:, :, first.skipped :],
                    without_first_key(call, query_BHTD.shape[2]),
                )
            results = gates.first_key_forward(first, rows, call)
        else:
            if own_sink:
                call = _with_sink(slotted, call)
            out_BHTD, lse_BHT = forward_masked(kernel, query_BHTD, key_BGSD, value_BGSD, call)
            if slot_logit is not None and not own_sink:
                results = gates.slot_forward(query_BHTD, out_BHTD, lse_BHT, slot_logit, slot_value)
            else:
                lse_BHT = lse_BHT.contiguous()
                if slot_logit is None:
                    shares = (lse_BHT.new_empty(0), lse_BHT.new_empty(0))
                else:
                    shares = gates.shares(lse_BHT, slot_logit)
                results = Results(in_order_of(query_BHTD, out_BHTD), lse_BHT, *shares)
    if ctx is not None:
        set_up_context(ctx, arguments, results)
    return results


def run_backward(
    arriving: Arriving, slotted: Slotted, results: Results, call: AttentionCall, *, lends: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients of query, key, value, slot logit, slot value and bias, of missing ones None.

    The slot is None if neither of its gradients is needed.
    `lends`: gate kernels may write into dO and Y while it runs, and then put them back.
    """
    given, slotted = slotted.slot_logit, _with_rows(slotted)
    query_BHTD, key_BGSD, value_BGSD, slot_logit, slot_value = slotted
    has_lse_grad = not (arriving.grad_lse_BHT is None and arriving.grad_gate_BHT is None)
    if has_lse_grad and not call.needs_gate_gradient:
        call = call._replace(needs_gate_gradient=True)
    kernel, gates, own_sink = _kernels(slotted, call)
    if arriving.grad_out_BHTD is None:
        arriving = arriving._replace(grad_out_BHTD=torch.zeros_like(results.out_BHTD))
    lse_BHT, inject = results.lse_BHT, not kernel.takes_lse_gradient
    if gates.borrows and inject and has_lse_grad:
        from megasink.attention.gate_kernels.slot_launch import lent

        arriving, results = lent(arriving, slotted, results, lends)

    def to_kernel(before: BeforeBackward) -> BackwardTensors:
        grad_out_BHTD, out_BHTD, lse_grad_BHT = before[:3]
        return BackwardTensors(grad_out_BHTD, *slotted[:3], out_BHTD, lse_BHT, lse_grad_BHT)

    grad_logit = grad_slot_value = None
    with without_autocast():
        if call.slot == Slot.FIRST_KEY:
            from megasink.attention.first_key import backward_first_key, first_key

            first = first_key(query_BHTD, key_BGSD, value_BGSD, call)
            around = gates.first_key_backward(arriving, results, first, call.scale, inject=inject)
            with around as before:
                grads = backward_first_key(kernel, before, to_kernel(before), first, call)
        else:
            if own_sink:
                call = _with_sink(slotted, call)
            with gates.slot_backward(
                arriving, results, slot_logit, slot_value, inject=inject, own_sink=own_sink
            ) as before:
                grads = backward_masked(kernel, to_kernel(before), call)
            if not lends:  # compilers were told these strides
                dense = map(in_order_of, slotted[:3], grads[:3])
                grads = Gradients._make((*dense, *grads[3:]))
            grad_logit, grad_slot_value = before.logit_grad, before.value_grad
            if grads.sink_H is not None and slot_logit is not None:
                sink_grad = grads.sink_H[None, :, None].sum_to_size(slot_logit.shape)
                grad_logit = sink_grad if grad_logit is None else sink_grad + grad_logit
    if grad_logit is not None and given is not None and given.dim() == 1:
        grad_logit = grad_logit.flatten()
    return *grads[:3], grad_logit, grad_slot_value, grads.distance_bias_HS


def _with_rows(slotted: Slotted) -> Slotted:
    """Return the tensors with a sink [H] as [1, H, 1]."""
    if slotted.slot_logit is None or slotted.slot_logit.dim() == 3:
        return slotted
    return Slotted(*slotted[:3], slotted.slot_logit.view(1, -1, 1))


def _with_sink(slotted: Slotted, call: AttentionCall) -> AttentionCall:
    assert slotted.slot_logit is not None
    heads = slotted.query_BHTD.shape[1]
    return call._replace(sink_H=slotted.slot_logit.flatten().expand(heads).contiguous())


def _kernels(slotted: Slotted, call: AttentionCall) -> tuple[Backend, GateKernels, bool]:
    """Return the attention kernel, the gate kernels, and whether the first adds the sink itself."""
    query_BHTD, _, value_BGSD, slot_logit, slot_value = slotted
    by_head = slot_logit is not None and slot_logit.shape[0] == slot_logit.shape[2] == 1
    return _chosen(
        (query_BHTD.device, query_BHTD.dtype, torch.are_deterministic_algorithms_enabled()),
        (*query_BHTD.shape[2:], *value_BGSD.shape[2:]),
        by_head and slot_value is None,
        call[2:8],
        call.distance_bias_HS is not None,
        call.cu_seqlens is not None,
    )


@remembered
def _chosen(
    where: Any, sizes: Any, by_head: bool, options: Any, biased: bool, packed: bool
) -> tuple[Backend, GateKernels, bool]:
    """Return `_kernels` of calls with these properties; `options` are fields of the call."""
    (device, dtype, deterministic), (queries, head_dim, keys, value_dim) = where, sizes
    call = AttentionCall(None, 1.0, *options)
    request = AttentionRequest(
        device_type=device.type,
        dtype=dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        variant="sink" if call.slot == Slot.GIVEN else "vanilla",
        window=call.window,
        causal=call.causal,
        distance_bias=biased,
        needs_gate_gradient=call.needs_gate_gradient,
        compute_capability=compute_capability(device),
        deterministic=deterministic,
    )
    kernel = backend_named(choose_backend(request, call.backend).name)
    gates = choose_gate_kernels(request, call.backend).name
    own_sink = gates == OWN
    if own_sink:  # other slots and masks of several blocks take gate kernels
        gates = choose_gate_kernels(replace(request, variant="vanilla"), call.backend).name
        one = packed or one_call(kernel, queries, keys, call) is not None
        # A single query or key may take another kernel than the one that adds sinks (cuDNN's).
        own_sink = by_head and one and 1 not in (queries, keys)
    return kernel, gate_kernels_named(gates), own_sink


def packs(slotted: Slotted, call: AttentionCall) -> bool:
    """Return whether the kernel takes packed documents in one call, its backward included."""
    query_BHTD = slotted.query_BHTD
    if query_BHTD.shape[0] > 1 or call.distance_bias_HS is not None:
        return False
    if torch.compiler.is_compiling():  # the choice of a kernel is not traced
        return False
    kernel, _, _ = _kernels(slotted, call)
    # In float16 a gradient of the LSE alone takes another kernel.
    same = query_BHTD.dtype is not torch.float16 or kernel.takes_lse_gradient
    return kernel.packs and same


# The tensors of the forward's arguments come first: those of `Slotted` and the bias of the call.
_TENSORS = len(Slotted._fields) + 1


def set_up_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Missing gradients stay None, so that their part of the backward is skipped.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    ctx.scalars = inputs[_TENSORS:]


def slot_backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_gate: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    *tensors, out_BHTD, lse_BHT, gate_BHT, weight_BHT = ctx.saved_tensors
    call = AttentionCall(tensors.pop(), *ctx.scalars)
    if call.slot == Slot.NONE:
        grad_gate = grad_weight = None
    if grad_weight is not None:  # p = 1 - G
        grad_gate = -grad_weight if grad_gate is None else grad_gate - grad_weight
    arriving = Arriving(grad_out, grad_lse, grad_gate)
    if grad_out is grad_lse is grad_gate is None:
        return (None,) * (_TENSORS + len(ctx.scalars))
    wanted, wanted_of_call = from_op(ctx.needs_input_grad, Slotted, AttentionCall)
    slotted, results = Slotted(*tensors), Results(out_BHTD, lse_BHT, gate_BHT, weight_BHT)
    if not (wanted.slot_logit or wanted.slot_value):
        slotted = slotted._replace(slot_logit=None, slot_value=None)
    if _owns(out_BHTD):
        found = run_backward(arriving, slotted, results, call, lends=True)
    else:
        from megasink.attention.custom_op import backward_op

        found = tuple(backward_op()(*arriving, *slotted, *results, *call))
    *grads, grad_logit, grad_value, grad_bias_HS = found
    grad_bias_HS = grad_bias_HS if wanted_of_call.distance_bias_HS else None
    grad_logit = grad_logit if wanted.slot_logit else None
    grad_value = grad_value if wanted.slot_value else None
    return *grads, grad_logit, grad_value, grad_bias_HS, *(None,) * len(ctx.scalars)


def _owns(out_BHTD: Tensor) -> bool:
    """Return whether the backward runs eagerly on one stream: neither traced nor differentiated."""
    traced = type(out_BHTD) is not Tensor or torch.compiler.is_compiling()
    return not (traced or torch.is_grad_enabled())


class _Eagerly(torch.autograd.Function):
    """The op without the dispatch of a custom op, half of its time on the host."""

    forward = staticmethod(run_forward)
    backward = staticmethod(slot_backward)


eagerly: Callable[..., Sequence[Tensor]] = _Eagerly.apply
