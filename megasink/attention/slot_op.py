"""The op behind every variant: attention over real keys plus one sink slot (docs/maths.md).

With O and LSE over the real keys, and a slot with logit s_i and value u_i:
lse' = logaddexp(LSE, s), G = sigmoid(LSE - s), p = sigmoid(s - LSE) = 1 - G, out = G O + p u.
Backward, for incoming dY, dG and e = d lse': the kernel gets dY, out and lse', and the gradient
g = p dG + e of its LSE; ds = p (dY . (u - out) + e - G dG); du = p dY.

A custom op takes only tensors and scalars, so callers unpack `Slotted`, `AttentionCall` and the
other records into arguments (`*tensors, *call`), and the op rebuilds them (`from_op`).

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim; 1 for a dimension
that broadcasts. Statistics (LSE, gates, logits and their gradients) are float32, or float64 for
float64.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasink.attention.backends import AttentionRequest, Backend, backend_named, choose_backend
from megasink.attention.backends.cuda import compute_capability
from megasink.attention.block_masks import backward_blocks, forward_blocks
from megasink.attention.call import AttentionCall, BackwardTensors, Slot, from_op, op_schema
from megasink.attention.first_key import backward_first_key, forward_first_key
from megasink.attention.injection import inject_lse_gradient
from megasink.attention.layout import (
    empty_in_order_of,
    in_order_of,
    repeat_groups,
    row_dot,
    statistics_dtype,
)


class Slotted(NamedTuple):
    """The input tensors, with any strides.

    Attributes:
        slot_logit: s, broadcastable to [B, H, T], statistics dtype; None unless `Slot.GIVEN`.
        slot_value: u, broadcastable to [B, H, T, D]; None for 0.
    """

    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    slot_logit: Tensor | None = None
    slot_value: Tensor | None = None


class Results(NamedTuple):
    """The results of the op.

    Attributes:
        out_BHTD: Dense, in the memory order of the query.
        lse_BHT: lse'.
        gate_BHT, weight_BHT: G and p; empty for `Slot.NONE`.
    """

    out_BHTD: Tensor
    lse_BHT: Tensor
    gate_BHT: Tensor
    weight_BHT: Tensor


class Arriving(NamedTuple):
    """Incoming gradients of the results; None if absent."""

    grad_out_BHTD: Tensor | None
    grad_lse_BHT: Tensor | None
    grad_gate_BHT: Tensor | None


@torch.library.custom_op(
    "megasink::slot_attention",
    mutates_args=(),
    schema=op_schema(Slotted, AttentionCall, outputs=len(Results._fields)),
)
def slot_attention_op(*arguments: Any) -> Results:
    """Run the forward of the op; call it through `megasink.attention.attention`.

    Args:
        arguments: The fields of `Slotted` and `AttentionCall`.
    """
    slotted, call = from_op(arguments, Slotted, AttentionCall)
    query_BHTD, key_BGSD, value_BGSD, slot_logit, slot_value = slotted
    kernel = _kernel(query_BHTD, call)
    if call.slot == Slot.FIRST_KEY:
        return Results(*forward_first_key(kernel, query_BHTD, key_BGSD, value_BGSD, call))
    out_BHTD, lse_BHT = forward_blocks(kernel, query_BHTD, key_BGSD, value_BGSD, call)
    lse_BHT = lse_BHT.contiguous()
    if slot_logit is None:
        nothing = (lse_BHT.new_empty(0), lse_BHT.new_empty(0))
        return Results(in_order_of(query_BHTD, out_BHTD), lse_BHT, *nothing)
    gate_BHT = (lse_BHT - slot_logit).sigmoid_()
    weight_BHT = (slot_logit - lse_BHT).sigmoid_()
    if out_BHTD.dtype is gate_BHT.dtype:
        out_BHTD.mul_(gate_BHT[..., None])
    else:
        out_BHTD = out_BHTD * gate_BHT[..., None]
    if slot_value is not None:
        out_BHTD += weight_BHT[..., None] * slot_value
    total_lse_BHT = torch.logaddexp(lse_BHT, slot_logit)
    out_BHTD = in_order_of(query_BHTD, out_BHTD.to(query_BHTD.dtype))
    return Results(out_BHTD, total_lse_BHT, gate_BHT, weight_BHT)


@torch.library.custom_op(
    "megasink::slot_attention_backward",
    mutates_args=(),
    schema=op_schema(Arriving, Slotted, Results, AttentionCall, outputs=6),
)
def slot_attention_backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Run the backward of the op.

    Args:
        arguments: The fields of `Arriving`, `Slotted` (with a slot of None if neither of its
            gradients is needed), `Results` and `AttentionCall`.

    Returns:
        Gradients of query, key, value, slot_logit, slot_value and distance_bias_HS; each of the
        last three is empty if its input is None.

    Raises:
        ConfigError: The kernel does not support an incoming LSE or gate gradient.
    """
    arriving, slotted, results, call = from_op(arguments, Arriving, Slotted, Results, AttentionCall)
    query_BHTD, key_BGSD, value_BGSD, slot_logit, slot_value = slotted
    out_BHTD, lse_BHT, _, weight_BHT = results
    grad_out_BHTD, lse_grad_BHT, grad_gate_BHT = arriving
    if grad_gate_BHT is not None:
        through_gate_BHT = grad_gate_BHT * weight_BHT
        lse_grad_BHT = through_gate_BHT if lse_grad_BHT is None else lse_grad_BHT + through_gate_BHT
    if lse_grad_BHT is not None and not call.needs_gate_gradient:
        call = call._replace(needs_gate_gradient=True)
    kernel = _kernel(query_BHTD, call)
    if grad_out_BHTD is None:
        grad_out_BHTD = torch.zeros_like(out_BHTD)
        arriving = arriving._replace(grad_out_BHTD=grad_out_BHTD)

    to_kernel = (grad_out_BHTD, out_BHTD)
    if lse_grad_BHT is not None and not kernel.takes_lse_gradient:
        to_kernel = inject_lse_gradient(grad_out_BHTD, out_BHTD, lse_grad_BHT)
        lse_grad_BHT = None
    tensors = BackwardTensors(
        to_kernel[0], query_BHTD, key_BGSD, value_BGSD, to_kernel[1], lse_BHT, lse_grad_BHT
    )
    grad_logit, grad_slot_value = lse_BHT.new_empty(0), query_BHTD.new_empty(0)
    if call.slot == Slot.FIRST_KEY:
        first_value_BH1D = repeat_groups(value_BGSD[:, :, :1], query_BHTD.shape[1])
        logit_grad_BHT = _slot_logit_grad(arriving, results, first_value_BH1D)
        *grads, grad_bias_HS = backward_first_key(
            kernel, tensors, grad_out_BHTD, weight_BHT, logit_grad_BHT, call
        )
        grad_bias_HS = lse_BHT.new_empty(0) if grad_bias_HS is None else grad_bias_HS
        return *grads, grad_logit, grad_slot_value, grad_bias_HS

    if slot_logit is not None:
        logit_grad_BHT = _slot_logit_grad(arriving, results, slot_value)
        grad_logit = logit_grad_BHT.sum_to_size(slot_logit.shape)
        if slot_value is not None:
            grad_slot_value = (weight_BHT[..., None] * grad_out_BHTD).sum_to_size(slot_value.shape)
            grad_slot_value = grad_slot_value.to(slot_value.dtype)
    *grads, grad_bias_HS = backward_blocks(kernel, tensors, call)
    inputs = (query_BHTD, key_BGSD, value_BGSD)
    grads = [in_order_of(tensor, grad) for tensor, grad in zip(inputs, grads, strict=True)]
    grad_bias_HS = lse_BHT.new_empty(0) if grad_bias_HS is None else grad_bias_HS
    return *grads, grad_logit, grad_slot_value, grad_bias_HS


def _slot_logit_grad(
    arriving: Arriving, results: Results, slot_value_BHTD: Tensor | None
) -> Tensor:
    """Return ds_i = p_i (dY_i . (u_i - out_i) + e_i - G_i dG_i), [B, H, T], statistics dtype."""
    grad_out_BHTD, grad_lse_BHT, grad_gate_BHT = arriving
    assert grad_out_BHTD is not None
    # One dot product with the difference, not two: exactly 0 where out is u (the first token).
    if slot_value_BHTD is None:
        grad_BHT = row_dot(grad_out_BHTD, results.out_BHTD).neg_()
    else:
        difference_BHTD = (results.out_BHTD - slot_value_BHTD).to(results.weight_BHT.dtype)
        grad_BHT = difference_BHTD.mul_(grad_out_BHTD).sum(-1).neg_()
    if grad_lse_BHT is not None:
        grad_BHT += grad_lse_BHT
    if grad_gate_BHT is not None:
        grad_BHT -= results.gate_BHT * grad_gate_BHT
    return grad_BHT.mul_(results.weight_BHT)


def _kernel(query_BHTD: Tensor, call: AttentionCall) -> Backend:
    request = AttentionRequest(
        device_type=query_BHTD.device.type,
        dtype=query_BHTD.dtype,
        head_dim=query_BHTD.shape[-1],
        variant="sink" if call.slot == Slot.GIVEN else "vanilla",
        window=call.window,
        causal=call.causal,
        distance_bias=call.distance_bias_HS is not None,
        needs_gate_gradient=call.needs_gate_gradient,
        compute_capability=compute_capability(query_BHTD.device),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return backend_named(choose_backend(request, call.backend).name)


@slot_attention_op.register_fake
def _(*arguments: Any) -> Results:
    slotted, call = from_op(arguments, Slotted, AttentionCall)
    query_BHTD = slotted.query_BHTD
    shape = query_BHTD.shape[:3]
    lse_BHT = query_BHTD.new_empty(shape, dtype=statistics_dtype(query_BHTD.dtype))
    gates = [lse_BHT.new_empty(0 if call.slot == Slot.NONE else shape) for _ in range(2)]
    return Results(empty_in_order_of(query_BHTD), lse_BHT, *gates)


@slot_attention_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, slotted, results, call = from_op(arguments, Arriving, Slotted, Results, AttentionCall)
    lse_BHT, bias_HS = results.lse_BHT, call.distance_bias_HS

    def given(tensor: Tensor | None, like: Tensor) -> Tensor:
        return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return (
        *(empty_in_order_of(tensor) for tensor in slotted[:3]),
        given(slotted.slot_logit, lse_BHT),
        given(slotted.slot_value, slotted.query_BHTD),
        given(bias_HS, lse_BHT),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Missing gradients stay None, so that their part of the backward is skipped.
    ctx.set_materialize_grads(False)
    slotted, call = from_op(inputs, Slotted, AttentionCall)
    ctx.save_for_backward(*slotted, *output, call.distance_bias_HS)
    ctx.call = call._replace(distance_bias_HS=None)


def _backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_gate: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    call: AttentionCall = ctx.call
    if call.slot == Slot.NONE:
        grad_gate = grad_weight = None
    if grad_weight is not None:  # p = 1 - G
        grad_gate = -grad_weight if grad_gate is None else grad_gate - grad_weight
    arriving = Arriving(grad_out, grad_lse, grad_gate)
    no_call_grads = dict.fromkeys(AttentionCall._fields)
    if all(grad is None for grad in arriving):
        return *(None for _ in Slotted._fields), *no_call_grads.values()
    wanted, wanted_of_call = from_op(ctx.needs_input_grad, Slotted, AttentionCall)
    *saved, bias_HS = ctx.saved_tensors
    slotted, results = from_op(saved, Slotted, Results)
    if not (wanted.slot_logit or wanted.slot_value):
        slotted = slotted._replace(slot_logit=None, slot_value=None)
    call = call._replace(distance_bias_HS=bias_HS)
    *grads, grad_logit, grad_value, grad_bias_HS = slot_attention_backward_op(
        *arriving, *slotted, *results, *call
    )
    if wanted_of_call.distance_bias_HS:
        no_call_grads["distance_bias_HS"] = grad_bias_HS
    slot_grads = (
        grad_logit if wanted.slot_logit else None,
        grad_value if wanted.slot_value else None,
    )
    return *grads, *slot_grads, *no_call_grads.values()


slot_attention_op.register_autograd(_backward, setup_context=_setup_context)
