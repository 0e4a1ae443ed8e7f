"""The op under every variant: attention over real keys plus one sink slot (docs/maths.md).

With O and LSE over the real keys, and a slot of logit s_i and value u_i:
lse' = logaddexp(LSE, s), G = sigmoid(LSE - s), p = sigmoid(s - LSE) = 1 - G, out = G O + p u.
Backward, for incoming dY, dG and e = d lse': the kernel gets dY, out and lse', and the gradient
g = p dG + e of its LSE; ds = p (dY . (u - out) + e - G dG); du = p dY.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim; 1 for a dimension
that broadcasts. Statistics (LSE, gates, logits and their gradients) are float32, or float64 for
float64.
"""

from typing import Any

import torch
from torch import Tensor

from megasink.attention.backends import (
    AttentionRequest,
    Backend,
    at_runtime,
    backend_named,
    choose_backend,
)
from megasink.attention.blocks import backward_blocks, forward_blocks
from megasink.attention.first_key import backward_first_key, forward_first_key
from megasink.attention.injection import inject_lse_gradient
from megasink.attention.layout import (
    empty_in_order_of,
    in_order_of,
    repeat_groups,
    row_dot,
    statistics_dtype,
)

# What the slot is. NO_SLOT: plain attention. GIVEN: a logit and maybe a value, passed in.
# FIRST_KEY: key and value 0 are the slot, and the real keys start at 1 (vanilla attention).
NO_SLOT, GIVEN, FIRST_KEY = "none", "given", "first-key"


@torch.library.custom_op("megasink::slot_attention", mutates_args=())
def slot_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot_logit: Tensor | None,
    slot_value: Tensor | None,
    distance_bias: Tensor | None,
    slot: str,
    causal: bool,
    prefix: int,
    window: int | None,
    scale: float,
    backend: str,
    needs_gate_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the op; `megasink.attention.attention` is the way to call it.

    Args:
        query, key, value: [B, H, T, D], [B, G, S, D], [B, G, S, D], any strides.
        slot_logit: s, broadcastable to [B, H, T], statistics dtype; for GIVEN.
        slot_value: u, broadcastable to [B, H, T, D]; None for 0.
        distance_bias: [H, S], entry [h, i - j] is added to z_ij; statistics dtype; None for 0.
        slot: NO_SLOT, GIVEN or FIRST_KEY.
        prefix: keys that every query sees.
        backend: a name, or "auto".

    Returns:
        out [B, H, T, D], dense, its dimensions in the order of the query's; then lse', G and p,
        [B, H, T], the last two empty for NO_SLOT.
    """
    biased = distance_bias is not None
    kernel = _kernel(query, slot, causal, window, biased, backend, needs_gate_gradient)
    mask: dict[str, Any] = {"causal": causal, "prefix": prefix, "window": window, "scale": scale}
    mask["distance_bias_HS"] = distance_bias
    if slot == FIRST_KEY:
        return forward_first_key(kernel, query, key, value, **mask)
    out_BHTD, lse_BHT = forward_blocks(kernel, query, key, value, **mask)
    lse_BHT = lse_BHT.contiguous()
    if slot_logit is None:
        return in_order_of(query, out_BHTD), lse_BHT, lse_BHT.new_empty(0), lse_BHT.new_empty(0)
    gate_BHT = (lse_BHT - slot_logit).sigmoid_()
    weight_BHT = (slot_logit - lse_BHT).sigmoid_()
    if out_BHTD.dtype is gate_BHT.dtype:
        out_BHTD.mul_(gate_BHT[..., None])
    else:
        out_BHTD = out_BHTD * gate_BHT[..., None]
    if slot_value is not None:
        out_BHTD += weight_BHT[..., None] * slot_value
    total_lse_BHT = torch.logaddexp(lse_BHT, slot_logit)
    return in_order_of(query, out_BHTD.to(query.dtype)), total_lse_BHT, gate_BHT, weight_BHT


@torch.library.custom_op("megasink::slot_attention_backward", mutates_args=())
def slot_attention_backward_op(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_gate: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot_logit: Tensor | None,
    slot_value: Tensor | None,
    distance_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    gate: Tensor,
    weight: Tensor,
    slot: str,
    causal: bool,
    prefix: int,
    window: int | None,
    scale: float,
    backend: str,
    needs_gate_gradient: bool,
    needs_slot_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Backward of the op.

    Returns:
        Gradients of query, key, value, slot_logit, slot_value and distance_bias; the last three
        empty where the input is None, those of the slot also where `needs_slot_gradient` is False.

    Raises:
        ConfigError: an LSE or gate gradient arrives at a kernel that cannot take it.
    """
    lse_grad = grad_lse
    if grad_gate is not None:
        lse_grad = grad_gate * weight if grad_lse is None else grad_lse + grad_gate * weight
    needs_gate_gradient = needs_gate_gradient or lse_grad is not None
    biased = distance_bias is not None
    kernel = _kernel(query, slot, causal, window, biased, backend, needs_gate_gradient)
    mask: dict[str, Any] = {"causal": causal, "prefix": prefix, "window": window, "scale": scale}
    mask["distance_bias_HS"] = distance_bias
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    kernel_grad_out, kernel_out = grad_out, out
    if lse_grad is not None and not kernel.takes_lse_gradient:
        kernel_grad_out, kernel_out = inject_lse_gradient(grad_out, out, lse_grad)
        lse_grad = None

    slot_grad = None
    if slot == FIRST_KEY:
        slot_value = repeat_groups(value[:, :, :1], query.shape[1])
    if slot == FIRST_KEY or (slot == GIVEN and needs_slot_gradient):
        slot_grad = _slot_logit_grad(grad_out, grad_lse, grad_gate, out, slot_value, gate, weight)
    if slot == FIRST_KEY:
        assert slot_grad is not None
        query_grad, key_grad, value_grad, bias_grad = backward_first_key(
            kernel,
            grad_out,
            kernel_grad_out,
            query,
            key,
            value,
            kernel_out,
            lse,
            weight,
            slot_grad,
            lse_grad,
            **mask,
        )
        bias_grad = lse.new_empty(0) if bias_grad is None else bias_grad
        no_slot_grads = lse.new_empty(0), query.new_empty(0)
        return query_grad, key_grad, value_grad, *no_slot_grads, bias_grad

    *grads, bias_grad = backward_blocks(
        kernel,
        kernel_grad_out,
        query,
        key,
        value,
        kernel_out,
        lse,
        lse_grad_BHT=lse_grad,
        **mask,
    )
    query_grad, key_grad, value_grad = (
        in_order_of(tensor, grad) for tensor, grad in zip((query, key, value), grads, strict=True)
    )
    slot_logit_grad, slot_value_grad = lse.new_empty(0), query.new_empty(0)
    if slot_grad is not None and slot_logit is not None:
        slot_logit_grad = slot_grad.sum_to_size(slot_logit.shape)
        if slot_value is not None:
            slot_value_grad = (weight[..., None] * grad_out).sum_to_size(slot_value.shape)
            slot_value_grad = slot_value_grad.to(slot_value.dtype)
    bias_grad = lse.new_empty(0) if bias_grad is None else bias_grad
    return query_grad, key_grad, value_grad, slot_logit_grad, slot_value_grad, bias_grad


def _slot_logit_grad(
    grad_out_BHTD: Tensor,
    grad_lse_BHT: Tensor | None,
    grad_gate_BHT: Tensor | None,
    out_BHTD: Tensor,
    slot_value_BHTD: Tensor | None,
    gate_BHT: Tensor,
    weight_BHT: Tensor,
) -> Tensor:
    """ds_i = p_i (dY_i . (u_i - out_i) + e_i - G_i dG_i), [B, H, T], statistics dtype."""
    # One dot with the difference, not two dots: exactly 0 where out is u (the first token).
    if slot_value_BHTD is None:
        grad_BHT = row_dot(grad_out_BHTD, out_BHTD).neg_()
    else:
        difference_BHTD = (out_BHTD - slot_value_BHTD).to(weight_BHT.dtype)
        grad_BHT = difference_BHTD.mul_(grad_out_BHTD).sum(-1).neg_()
    if grad_lse_BHT is not None:
        grad_BHT += grad_lse_BHT
    if grad_gate_BHT is not None:
        grad_BHT -= gate_BHT * grad_gate_BHT
    return grad_BHT.mul_(weight_BHT)


def _kernel(
    query: Tensor,
    slot: str,
    causal: bool,
    window: int | None,
    biased: bool,
    backend: str,
    needs_gate_gradient: bool,
) -> Backend:
    request = AttentionRequest(
        device_type=query.device.type,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        variant="sink" if slot == GIVEN else "vanilla",
        window=window,
        causal=causal,
        distance_bias=biased,
        needs_gate_gradient=needs_gate_gradient,
    )
    request = at_runtime(request, query.device.index)
    return backend_named(choose_backend(request, backend).name)


@slot_attention_op.register_fake
def _(query, key, value, slot_logit, slot_value, distance_bias, slot, *options):  # type: ignore[no-untyped-def]
    shape = query.shape[:3]
    empty = query.new_empty(shape, dtype=statistics_dtype(query.dtype))
    gates = [empty.new_empty(0 if slot == NO_SLOT else shape) for _ in range(2)]
    return empty_in_order_of(query), empty, *gates


@slot_attention_backward_op.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_out,
    grad_lse,
    grad_gate,
    query,
    key,
    value,
    slot_logit,
    slot_value,
    distance_bias,
    out,
    lse,
    gate,
    weight,
    slot,
    causal,
    prefix,
    window,
    scale,
    backend,
    needs_gate_gradient,
    needs_slot_gradient,
):
    grads = [empty_in_order_of(tensor) for tensor in (query, key, value)]
    for tensor, source in ((slot_logit, lse), (slot_value, query)):
        given = needs_slot_gradient and slot == GIVEN and tensor is not None
        grads.append(tensor.new_empty(tensor.shape) if given else source.new_empty(0))
    grads.append(lse.new_empty(0 if distance_bias is None else distance_bias.shape))
    return tuple(grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # A gradient that does not arrive stays None, so that its part of the backward is skipped.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]


def _backward(
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    grad_gate: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if ctx.options[0] == NO_SLOT:
        grad_gate = grad_weight = None
    if grad_weight is not None:  # p = 1 - G
        grad_gate = -grad_weight if grad_gate is None else grad_gate - grad_weight
    none: tuple[None, ...] = (None,) * len(ctx.options)
    if grad_out is None and grad_lse is None and grad_gate is None:
        return None, None, None, None, None, None, *none
    wants_logit, wants_value, wants_bias = ctx.needs_input_grad[3:6]
    *grads, logit_grad, slot_value_grad, bias_grad = slot_attention_backward_op(
        grad_out,
        grad_lse,
        grad_gate,
        *ctx.saved_tensors,
        *ctx.options,
        wants_logit or wants_value,
    )
    return (
        *grads,
        logit_grad if wants_logit else None,
        slot_value_grad if wants_value else None,
        bias_grad if wants_bias else None,
        *none,
    )


slot_attention_op.register_autograd(_backward, setup_context=_setup_context)
