"""Defects that a kernel on a GPU may have turn the tests of tests/gpu red, on a stand-in here.

Not covered: what only hardware does (races, misaligned addresses, sizes beyond 2**31).
"""

import contextlib
import math

import pytest

from megasink.attention import VARIANTS, gate_kernels, kernels
from megasink.attention.gate_kernels import plain_gate_kernels, slot_launch
from megasink.attention.kernels.aten_cpu import FlashCpuBackend
from tests.gpu import cases, test_attention_gpu, test_edges_gpu

NAME = "stand-in"


class StandIn(FlashCpuBackend):
    """PyTorch's CPU kernel in the place of a CUDA kernel; subclasses have one defect each."""

    name = NAME

    def supports(self, request):
        return None


class LseInBase2(StandIn):
    """Consistent in itself: its backward takes the LSE as its forward returns it."""

    def launch_forward(self, query, key, value, call):
        out, lse = super().launch_forward(query, key, value, call)
        return out, lse / math.log(2.0)

    def launch_backward(self, tensors, call):
        tensors = tensors._replace(lse_BHT=tensors.lse_BHT * math.log(2.0))
        return super().launch_backward(tensors, call)


class LseRounded(StandIn):
    def launch_forward(self, query, key, value, call):
        out, lse = super().launch_forward(query, key, value, call)
        return out, lse.bfloat16().float()


class HeadsOfGroupsInTurns(StandIn):
    """Head h has the keys of group h % G, not of h // (H / G)."""

    def _tiled(self, query, *tensors):
        return [t.repeat(1, query.shape[1] // t.shape[1], 1, 1) for t in tensors]

    def launch_forward(self, query, key, value, call):
        return super().launch_forward(query, *self._tiled(query, key, value), call)

    def launch_backward(self, tensors, call):
        groups = tensors.key_BGSD.shape[1]
        key, value = self._tiled(tensors.query_BHTD, tensors.key_BGSD, tensors.value_BGSD)
        tiled = tensors._replace(key_BGSD=key, value_BGSD=value)
        query_grad, *grads = super().launch_backward(tiled, call)
        return query_grad, *(grad.unflatten(1, (-1, groups)).sum(1) for grad in grads)


class HalfOfDelta(StandIn):
    def launch_backward(self, tensors, call):
        return super().launch_backward(tensors._replace(out_BHTD=tensors.out_BHTD * 0.5), call)


class Borrowing(plain_gate_kernels.PlainGateKernels):
    """Writes the injected rows into dO and O, as the Triton kernels do."""

    name, borrows = "borrowing", True

    @contextlib.contextmanager
    def _lent(self, arriving, results, around):
        lent = arriving.grad_out_BHTD, results.out_BHTD
        with around as before:
            rows = before.grad_out_BHTD, before.out_BHTD
            kept = [tensor.clone() for tensor in lent]
            for tensor, injected in zip(lent, [row.clone() for row in rows], strict=True):
                tensor.copy_(injected)
            yield plain_gate_kernels.BeforeBackward(*lent, *before[2:])
            for tensor, value in zip(lent, kept, strict=True):
                tensor.copy_(value)

    def slot_backward(self, arriving, results, *slot, **options):
        around = super().slot_backward(arriving, results, *slot, **options)
        return self._lent(arriving, results, around)

    def first_key_backward(self, arriving, results, *first, inject):
        around = super().first_key_backward(arriving, results, *first, inject=inject)
        return self._lent(arriving, results, around)


def outputs_and_gradients(variant, window=None):
    test_attention_gpu.test_outputs_and_gradients(variant, window, NAME)


def shared_memory(variant):
    kernel = f"{NAME}+{Borrowing.name}"
    test_edges_gpu.test_an_output_gradient_in_the_memory_of_the_output(variant, kernel)


# Tests of the suite that are called here, by a name of their own.
CHECKS = {
    **{f"outputs {v}": (outputs_and_gradients, v) for v in VARIANTS},
    **{f"window {v}": (outputs_and_gradients, v, 16) for v in VARIANTS},
    **{f"shared memory {v}": (shared_memory, v) for v in VARIANTS},
    "large sinks": (test_attention_gpu.test_large_sinks, 30.0, NAME),
    "rectangle": (test_edges_gpu.test_rectangles_through_autograd, 64, 200, None, "sink", NAME),
    "low scores": (test_edges_gpu.test_log_sum_exps_far_below_zero, "sink", NAME),
    "documents": (test_edges_gpu.test_packed_documents, 193, "vanilla", NAME),
}


@pytest.fixture
def red(monkeypatch):
    """Names of those checks that fail, with a kernel in the place of a CUDA kernel."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setitem(gate_kernels._REGISTRY, Borrowing.name, Borrowing())

    def of(kernel, names=CHECKS):
        kernels.register_backend(kernel, before="eager")
        kernels.forget_choices()
        found = set()
        for name in names:
            check, *arguments = CHECKS[name]
            try:
                check(*arguments)
            except AssertionError:
                found.add(name)
        return found

    yield of
    kernels._REGISTRY.pop(NAME, None)
    kernels.forget_choices()


def test_without_a_defect_all_are_green(red):
    assert red(StandIn()) == set()


@pytest.mark.parametrize(
    ("kernel", "needed"),
    [
        (LseInBase2, {"outputs vanilla", "outputs sink", "window sink", "documents"}),
        (LseRounded, {"outputs vanilla", "outputs sink", "outputs off-by-one", "low scores"}),
        (HeadsOfGroupsInTurns, {"outputs vanilla", "outputs sink", "rectangle", "documents"}),
        (HalfOfDelta, {"outputs vanilla", "outputs sink", "rectangle", "large sinks"}),
    ],
)
def test_a_defect_of_a_kernel_is_seen(red, kernel, needed):
    assert red(kernel(), needed) == needed


def test_an_output_gradient_that_is_overwritten_is_seen(red, monkeypatch):
    """Without the copies that `lent` makes, and only where memory is shared."""
    monkeypatch.setattr(
        slot_launch, "lent", lambda arriving, slotted, results, lends: (arriving, results)
    )
    assert red(StandIn()) == {f"shared memory {variant}" for variant in VARIANTS}


def test_a_wrong_sign_of_the_sinks_gradient_is_seen(red, monkeypatch):
    of_slot = plain_gate_kernels._slot_logit_grad
    monkeypatch.setattr(plain_gate_kernels, "_slot_logit_grad", lambda *given: -of_slot(*given))
    needed = {"outputs sink", "window sink", "large sinks", "low scores"}
    assert red(StandIn(), needed) == needed


def test_an_lse_without_the_sink_is_seen(red, monkeypatch):
    forward = plain_gate_kernels.PlainGateKernels.slot_forward

    def without(self, query, out, lse, *slot):
        return forward(self, query, out, lse, *slot)._replace(lse_BHT=lse.contiguous())

    monkeypatch.setattr(plain_gate_kernels.PlainGateKernels, "slot_forward", without)
    needed = {"outputs sink", "outputs off-by-one", "large sinks"}
    assert red(StandIn(), needed) == needed
