"""Whose memory Triton's gate kernels write into, in Triton's interpreter.

`test_gate_kernels.py` runs this file as it runs interpreted_gate_kernels.py.
"""

import pytest
import torch

from megasink.attention import VARIANTS, attention
from megasink.attention.call import Arriving, AttentionCall, Results, Slot, Slotted
from megasink.attention.custom_op import slot_attention_backward_op, slot_attention_op
from megasink.attention.kernels.aten_cpu import FlashCpuBackend
from tests.attention.interpreted_gate_kernels import BF16, _on_a_cpu

__all__ = ["_on_a_cpu"]  # the fixture of every test here, too


def _attended(variant, kernels="triton", heads=2):
    torch.manual_seed(0)
    leaves = [torch.randn(1, heads, 9, 8, dtype=BF16).requires_grad_() for _ in range(3)]
    sink = torch.zeros(heads, requires_grad=True) if variant == "sink" else None
    options = {"variant": variant, "sink_H": sink, "backend": f"flash-cpu+{kernels}"}
    out, _, gate = attention(*leaves, **options)
    return leaves if sink is None else [*leaves, sink], out, gate


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_in_the_memory_of_a_result_or_an_input(variant):
    """`out.backward(out.detach())`; and the query, key or value as the output's gradient."""
    for kernels in ("triton", "torch"):
        leaves, out, gate = _attended(variant, kernels)
        for grad_out in (out, *leaves[:3]):
            given = [
                torch.autograd.grad(
                    [out, gate], leaves, [arriving, torch.ones_like(gate)], retain_graph=True
                )
                for arriving in (grad_out.detach(), grad_out.detach().clone())
            ]
            for shared, alone in zip(*given, strict=True):
                assert torch.equal(shared, alone)


@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_rows_are_put_back_if_the_kernel_fails(variant, monkeypatch):
    leaves, out, gate = _attended(variant)
    grad_out, before = torch.randn(1, 2, 9, 8).to(BF16), out.detach().clone()
    given, kept = [grad_out, torch.ones_like(gate)], grad_out.clone()
    wanted = torch.autograd.grad([out, gate], leaves, given, retain_graph=True)

    def out_of_memory(self, tensors, call):
        assert not torch.equal(out, before)
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(FlashCpuBackend, "launch_backward", out_of_memory)
        with pytest.raises(MemoryError):
            torch.autograd.grad([out, gate], leaves, given, retain_graph=True)
    assert torch.equal(out, before)
    assert torch.equal(grad_out, kept)
    again = torch.autograd.grad([out, gate], leaves, given)
    assert all(map(torch.equal, wanted, again))


@pytest.mark.parametrize("slot", Slot)
def test_the_ops_are_what_their_schemas_say(slot, monkeypatch):
    """Nothing written, not even for a time; no result in an input's memory; shapes."""
    launched = FlashCpuBackend.launch_backward

    def while_nothing_is_written(self, tensors, call):
        assert all(map(torch.equal, (arriving.grad_out_BHTD, results.out_BHTD), before))
        return launched(self, tensors, call)

    query, key, value = (torch.randn(1, n, 9, 8, dtype=BF16) for n in (4, 2, 2))
    logit = torch.zeros(1, 4, 1) if slot == Slot.GIVEN else None
    call = AttentionCall(None, 0.3, slot=slot, backend="flash-cpu+triton")
    slotted = Slotted(query, key, value, logit)
    results = Results(*slot_attention_op(*slotted, *call))
    wanted = [None if t is None else t.detach().requires_grad_() for t in slotted]
    torch.library.opcheck(slot_attention_op, (*wanted, *call))
    arriving = Arriving(torch.randn_like(query), torch.randn(1, 4, 9), None)
    before = arriving.grad_out_BHTD.clone(), results.out_BHTD.clone()
    with monkeypatch.context() as watching:
        watching.setattr(FlashCpuBackend, "launch_backward", while_nothing_is_written)
        slot_attention_backward_op(*arriving, *slotted, *results, *call)
    torch.library.opcheck(slot_attention_backward_op, (*arriving, *slotted, *results, *call))


def test_under_compiled_autograd():
    leaves, out, gate = _attended("sink")
    given = [out.detach(), torch.ones_like(gate)]
    wanted = torch.autograd.grad([out, gate], leaves, given, retain_graph=True)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiler):
        found = torch.autograd.grad([out, gate], leaves, given)
    assert all(map(torch.equal, wanted, found))
