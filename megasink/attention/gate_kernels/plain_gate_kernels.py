"""Gate kernels in plain tensor operations, on every device: the definition of the others.

With O and LSE over the real keys, and a slot with logit s_i and value u_i:
lse' = logaddexp(LSE, s), G = sigmoid(LSE - s), p = sigmoid(s - LSE) = 1 - G, out = G O + p u.
Backward, for incoming dY, dG and e = d lse': the kernel gets dY, out and lse', and the gradient
g = p dG + e of its LSE; ds = p (dY . (u - out) + e - G dG); du = p dY.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim; 1 for a dimension
that broadcasts.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from megasink.attention.call import Arriving, AttentionCall, Results
from megasink.attention.gate_kernels.protocol import BeforeBackward, FirstKey, GateKernels
from megasink.attention.injection import inject_lse_gradient
from megasink.attention.kernels import AttentionRequest
from megasink.attention.layout import (
    as_order_of,
    dot_with_each_row,
    empty_in_order_of,
    in_order_of,
    repeat_groups,
    row_dot,
    statistics_dtype,
    weighted_row_sum,
)


class PlainGateKernels(GateKernels):
    """One PyTorch operation after the other."""

    name = "torch"

    def supports(self, request: AttentionRequest) -> str | None:
        return None

    def slot_forward(
        self,
        query_BHTD: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        slot_logit: Tensor,
        slot_value: Tensor | None,
    ) -> Results:
        lse_BHT = lse_BHT.contiguous()
        gate_BHT = (lse_BHT - slot_logit).sigmoid_()
        weight_BHT = (slot_logit - lse_BHT).sigmoid_()
        gate_BHT1, into_BHTD = gate_BHT[..., None], as_order_of(query_BHTD, out_BHTD)
        if out_BHTD.dtype is not gate_BHT.dtype:
            out_BHTD = out_BHTD * gate_BHT1
        elif into_BHTD is None and query_BHTD.dtype is out_BHTD.dtype:
            into_BHTD = empty_in_order_of(query_BHTD, out_BHTD.shape[-1])
            out_BHTD = torch.mul(out_BHTD, gate_BHT1, out=into_BHTD)
        else:
            out_BHTD.mul_(gate_BHT1)
        if slot_value is not None:
            out_BHTD += weight_BHT[..., None] * slot_value
        total_lse_BHT = torch.logaddexp(lse_BHT, slot_logit)
        out_BHTD = in_order_of(query_BHTD, out_BHTD.to(query_BHTD.dtype))
        return Results(out_BHTD, total_lse_BHT, gate_BHT, weight_BHT)

    def shares(self, lse_BHT: Tensor, slot_logit: Tensor) -> tuple[Tensor, Tensor]:
        log_weight_BHT = (slot_logit - lse_BHT).clamp_(max=0.0)  # rounding may raise it above
        return torch.expm1(log_weight_BHT).neg_(), log_weight_BHT.exp_()

    def first_key_forward(
        self, first: FirstKey, rows: tuple[Tensor, Tensor] | None, call: AttentionCall
    ) -> Results:
        query_BHTD, keys, alone = first.query_BHTD, first.keys, first.alone
        queries = query_BHTD.shape[2]
        first_value_BH1D = _by_query(first.value_BG1D, first)
        first_key_BH1D = _by_query(first.key_BG1D, first)
        dtype = statistics_dtype(query_BHTD.dtype)
        logit_BHT = dot_with_each_row(query_BHTD, first_key_BH1D).mul_(call.scale)
        if call.distance_bias_HS is not None:
            logit_BHT += call.distance_bias_HS[:, keys - queries : keys]
        if first.documents is not None:
            position_T = _places(first).position_T
            if call.window is not None:
                logit_BHT.masked_fill_(position_T >= call.window, -torch.inf)
            assert rows is not None
            rows = rows[0], rows[1].masked_fill(position_T == 0, -torch.inf)
        elif call.window is not None:
            logit_BHT[..., max(call.window - (keys - queries), 0) :] = -torch.inf
        out_BHTD = empty_in_order_of(query_BHTD, first.value_BG1D.shape[-1])
        lse_BHT = logit_BHT.clone(memory_format=torch.contiguous_format)
        gate_BHT, weight_BHT = torch.zeros_like(lse_BHT), torch.ones_like(lse_BHT)
        out_BHTD[:, :, :alone] = first_value_BH1D[:, :, :alone]
        if rows is not None:
            rows_BHTD, rows_lse_BHT = rows
            rows_logit_BHT = logit_BHT[..., alone:]
            torch.sigmoid(rows_lse_BHT - rows_logit_BHT, out=gate_BHT[..., alone:])
            torch.sigmoid(rows_logit_BHT - rows_lse_BHT, out=weight_BHT[..., alone:])
            torch.logaddexp(rows_lse_BHT, rows_logit_BHT, out=lse_BHT[..., alone:])
            # G O + (1 - G) u in one pass; written in place if no final cast is needed.
            mix = (rows_BHTD.to(dtype), first_value_BH1D.to(dtype), weight_BHT[..., alone:, None])
            if out_BHTD.dtype is dtype:
                torch.lerp(*mix, out=out_BHTD[:, :, alone:])
            else:
                out_BHTD[:, :, alone:] = torch.lerp(*mix)
        return Results(out_BHTD, lse_BHT, gate_BHT, weight_BHT)

    def slot_backward(
        self,
        arriving: Arriving,
        results: Results,
        slot_logit: Tensor | None,
        slot_value: Tensor | None,
        *,
        inject: bool,
        own_sink: bool = False,
    ) -> nullcontext[BeforeBackward]:
        for_kernel = _for_kernel(arriving, results, inject)
        logit_grad = value_grad = None
        if own_sink:
            if slot_logit is not None and arriving.grad_gate_BHT is not None:
                logit_grad_BHT = -results.weight_BHT * arriving.grad_gate_BHT
                logit_grad = logit_grad_BHT.sum_to_size(slot_logit.shape)
        elif slot_logit is not None:
            logit_grad_BHT = _slot_logit_grad(arriving, results, slot_value)
            logit_grad = logit_grad_BHT.sum_to_size(slot_logit.shape)
            if slot_value is not None:
                value_grad = slot_value_grad(arriving, results, slot_value)
        return nullcontext(BeforeBackward(*for_kernel, logit_grad, value_grad))

    def first_key_backward(
        self,
        arriving: Arriving,
        results: Results,
        first: FirstKey,
        scale: float,
        *,
        inject: bool,
    ) -> nullcontext[BeforeBackward]:
        for_kernel = _for_kernel(arriving, results, inject)
        logit_grad_BHT = _slot_logit_grad(arriving, results, _by_query(first.value_BG1D, first))
        weight_BHT, grad_out_BHTD, alone = results.weight_BHT, arriving.grad_out_BHTD, first.alone
        assert grad_out_BHTD is not None

        # Functions: their memory is needed only when the kernel's is free again.
        def add_to_query(rows_BHTD: Tensor | None, grad_query_BHTD: Tensor) -> None:
            first_key_BH1D = _by_query(first.key_BG1D, first)
            scaled_grad_BHT1 = scale * logit_grad_BHT[..., None]
            of_alone = scaled_grad_BHT1[:, :, :alone] * first_key_BH1D[:, :, :alone]
            grad_query_BHTD[:, :, :alone] = of_alone
            if rows_BHTD is not None:
                into_BHTD = grad_query_BHTD[:, :, alone:]
                added = (scaled_grad_BHT1[:, :, alone:], first_key_BH1D)
                torch.addcmul(rows_BHTD, *added, out=into_BHTD)

        def fill_first_rows(grad_key_BGSD: Tensor, grad_value_BGSD: Tensor) -> None:
            scaled_grad_BHT = scale * logit_grad_BHT
            _fill(grad_key_BGSD, scaled_grad_BHT, first.query_BHTD, first)
            _fill(grad_value_BGSD, weight_BHT, grad_out_BHTD, first)

        return nullcontext(
            BeforeBackward(*for_kernel, logit_grad_BHT, None, add_to_query, fill_first_rows)
        )


def _by_query(first_BG1D: Tensor, first: FirstKey) -> Tensor:
    """Return the first key or value of each head, [B, H, 1, D], or if packed [B, H, T, D]."""
    if first.documents is not None:
        first_BG1D = first_BG1D[:, :, _places(first).start_T]
    return repeat_groups(first_BG1D, first.query_BHTD.shape[1])


def _places(first: FirstKey) -> Any:
    from megasink.attention.documents import first_keys

    return first_keys(first.documents or (), first.query_BHTD.shape[2], first.query_BHTD.device)


def _fill(grad_BGSD: Tensor, weight_BHT: Tensor, rows_BHTD: Tensor, first: FirstKey) -> None:
    """Write the sums of weight * row over the queries into the rows of first keys."""
    if first.documents is None:
        grad_BGSD[:, :, 0] = weighted_row_sum(weight_BHT, rows_BHTD, grad_BGSD.shape[1])
        return
    from megasink.attention.documents import fill_first_rows

    fill_first_rows(grad_BGSD, weight_BHT, rows_BHTD, first.documents)


def slot_value_grad(arriving: Arriving, results: Results, slot_value: Tensor) -> Tensor:
    """Return du, in the shape and dtype of u."""
    assert arriving.grad_out_BHTD is not None
    grad = results.weight_BHT[..., None] * arriving.grad_out_BHTD
    return grad.sum_to_size(slot_value.shape).to(slot_value.dtype)


def _for_kernel(
    arriving: Arriving, results: Results, inject: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return grad_out, out and the LSE gradient that the kernel gets."""
    grad_out_BHTD, lse_grad_BHT, grad_gate_BHT = arriving
    assert grad_out_BHTD is not None
    if grad_gate_BHT is not None:
        through_gate_BHT = grad_gate_BHT * results.weight_BHT
        lse_grad_BHT = through_gate_BHT if lse_grad_BHT is None else lse_grad_BHT + through_gate_BHT
    if lse_grad_BHT is None or not inject:
        return grad_out_BHTD, results.out_BHTD, lse_grad_BHT
    return *inject_lse_gradient(grad_out_BHTD, results.out_BHTD, lse_grad_BHT), None


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
