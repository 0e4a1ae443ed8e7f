"""Gate kernels in Triton: one launch after the attention kernel's forward, two around its backward.

The rows that carry the gradient of the LSE into a kernel differ from dY and Y in one or two leading
channels. Only those are written, in place: copies of both would be half of the memory traffic of
the backward. They are put back on the same stream right after the attention kernel's backward, so
nothing that the stream runs later sees them. Where another tensor of the backward has that memory,
or a compiler arranges the operations, the caller passes copies (op.py). Sums over tokens
are one partial sum per program and then a reduction, without atomics: the same bits every time.
"""

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from os import environ
from pathlib import Path

import torch
from torch import Tensor

from megasink.attention.call import Arriving, AttentionCall, Results
from megasink.attention.gate_kernels import slot_launch
from megasink.attention.gate_kernels.explicit_gate_launch import gate_rows
from megasink.attention.gate_kernels.plain_gate_kernels import slot_value_grad
from megasink.attention.gate_kernels.protocol import BeforeBackward, FirstKey, GateKernels
from megasink.attention.kernels import AttentionRequest
from megasink.attention.kernels.cuda import package_reason
from megasink.attention.layout import as_order_of, dense_rows, empty_in_order_of

# A row of a tile is one program's.
LARGEST_HEAD_DIM = 1024


class TritonGateKernels(GateKernels):
    """For A100 and later, in bfloat16, float16 and float32; any head dim up to 1024."""

    name = "triton"
    borrows = True
    gate_rows = staticmethod(gate_rows)

    def supports(self, request: AttentionRequest) -> str | None:
        if request.device_type != "cuda":
            return f"these kernels run on CUDA devices, not on {request.device_type}"
        capability = request.compute_capability
        if capability is not None and capability < (8, 0):
            has = ".".join(map(str, capability))
            return f"these kernels need compute capability 8.0 or later, but the device has {has}"
        if request.dtype is torch.float64:
            return "these kernels compute in float32, not in torch.float64"
        if request.head_dim > LARGEST_HEAD_DIM:
            return f"the head dim must be at most {LARGEST_HEAD_DIM}, got {request.head_dim}"
        if request.distance_bias:
            return "these kernels do not support a distance bias"
        return package_reason("triton", "triton") or _toolchain_reason()

    def slot_forward(
        self,
        query_BHTD: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        slot_logit: Tensor,
        slot_value: Tensor | None,
    ) -> Results:
        out_BHTD = dense_rows(out_BHTD)
        value = None if slot_value is None else dense_rows(slot_value)
        own = as_order_of(query_BHTD, out_BHTD)
        if own is None:
            own = empty_in_order_of(query_BHTD, out_BHTD.shape[-1])
        results = _empty_results(query_BHTD, own)
        slot_launch.slot_forward(results, (out_BHTD, lse_BHT), value, logit=slot_logit)
        return results

    def shares(self, lse_BHT: Tensor, slot_logit: Tensor) -> tuple[Tensor, Tensor]:
        from megasink.attention.gate_kernels.triton_shares import sink_shares

        return sink_shares(lse_BHT, slot_logit)

    def first_key_forward(
        self, first: FirstKey, rows: tuple[Tensor, Tensor] | None, call: AttentionCall
    ) -> Results:
        visible = queries = first.query_BHTD.shape[2]
        if call.window is not None:
            visible = call.window - (first.keys - queries)
        first = _dense(first)
        results = _empty_results(
            first.query_BHTD,
            empty_in_order_of(first.query_BHTD, first.value_BG1D.shape[-1]),
        )
        if rows is not None:
            rows = dense_rows(rows[0]), rows[1]
        slot_launch.slot_forward(
            results, rows, first.value_BG1D, first=first, scale=call.scale, visible=visible
        )
        return results

    @contextmanager
    def slot_backward(
        self,
        arriving: Arriving,
        results: Results,
        slot_logit: Tensor | None,
        slot_value: Tensor | None,
        *,
        inject: bool,
        own_sink: bool = False,
    ) -> Iterator[BeforeBackward]:
        if own_sink and arriving.grad_gate_BHT is None:
            slot_logit = None  # the kernel's gradient is whole
        if slot_logit is None:
            slot_value = None
        by_token = slot_logit is not None and slot_logit.shape[2] > 1
        value_by_token = slot_value is not None and slot_value.shape[2] > 1
        value_grad = None
        if slot_value is not None and value_by_token:
            value_grad = slot_value_grad(arriving, results, slot_value)
        taken = slot_launch.slot_backward(
            arriving,
            results,
            None if slot_value is None else dense_rows(slot_value),
            inject=inject,
            logit_grad=by_token,
            logit_sum=slot_logit is not None and not by_token,
            value_sum=slot_value is not None and not value_by_token,
            own_sink=own_sink,
        )
        try:
            logit_grad = None
            if slot_logit is not None:
                logit_grad = _to_size(taken.logit_grad_BHT, taken.logit_sum_BHN, slot_logit.shape)
            if slot_value is not None and taken.value_sum_BHND is not None:
                sum_BH1D = taken.value_sum_BHND.sum(2, keepdim=True)
                value_grad = sum_BH1D.sum_to_size(slot_value.shape).to(slot_value.dtype)
            yield BeforeBackward(
                taken.grad_out_BHTD,
                taken.out_BHTD,
                taken.lse_grad_BHT,
                logit_grad,
                value_grad,
            )
        finally:
            slot_launch.restore(taken)

    @contextmanager
    def first_key_backward(
        self,
        arriving: Arriving,
        results: Results,
        first: FirstKey,
        scale: float,
        *,
        inject: bool,
    ) -> Iterator[BeforeBackward]:
        from megasink.attention.gate_kernels import triton_first_key

        first = _dense(first)
        gradients = slot_launch.slot_backward(
            arriving,
            results,
            first.value_BG1D,
            inject=inject,
            logit_grad=True,
            value_sum=True,
            first=first,
            scale=scale,
        )
        logit_grad_BHT = gradients.logit_grad_BHT
        key_sum_BHND, value_sum_BHND = gradients.key_sum_BHND, gradients.value_sum_BHND
        assert logit_grad_BHT is not None
        assert key_sum_BHND is not None
        assert value_sum_BHND is not None
        try:
            yield BeforeBackward(
                gradients.grad_out_BHTD,
                gradients.out_BHTD,
                gradients.lse_grad_BHT,
                logit_grad_BHT,
                add_to_query=lambda rows_BHTD, grad_query_BHTD: triton_first_key.add_to_query(
                    rows_BHTD, grad_query_BHTD, logit_grad_BHT, first, scale
                ),
                fill_first_rows=lambda grad_key_BGSD, grad_value_BGSD: (
                    triton_first_key.fill_first_rows(
                        key_sum_BHND, value_sum_BHND, grad_key_BGSD, grad_value_BGSD, first
                    )
                ),
            )
        finally:
            slot_launch.restore(gradients)


def _empty_results(query_BHTD: Tensor, out_BHTD: Tensor) -> Results:
    statistics = (query_BHTD.new_empty(query_BHTD.shape[:3], dtype=torch.float32) for _ in range(3))
    return Results(out_BHTD, *statistics)


def _dense(first: FirstKey) -> FirstKey:
    query_BHTD, key_BG1D, value_BG1D = map(
        dense_rows, (first.query_BHTD, first.key_BG1D, first.value_BG1D)
    )
    return FirstKey(query_BHTD, key_BG1D, value_BG1D, *first[3:])


def _to_size(grad_BHT: Tensor | None, sum_BHN: Tensor | None, shape: torch.Size) -> Tensor:
    """Return the gradient of a slot logit of this shape."""
    if grad_BHT is not None:
        return grad_BHT.sum_to_size(shape)
    assert sum_BHN is not None
    sum_dims = [dim for dim in (0, 1) if shape[dim] == 1 and sum_BHN.shape[dim] > 1]
    return sum_BHN.sum([*sum_dims, 2], keepdim=True)


@lru_cache
def _toolchain_reason() -> str | None:
    """Return why Triton cannot build its launcher, which it compiles at its first kernel."""
    compilers = [*environ.get("CC", "").split()[:1], "gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return "Triton cannot find a C compiler: install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.is_file():
        return f"Triton needs Python's headers, and {header} is missing: install python3-dev"
    return None
