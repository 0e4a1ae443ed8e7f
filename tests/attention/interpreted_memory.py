"""Triton's gate kernels around attention kernels, and whose memory they write into; interpreted.

`test_gate_kernels.py` runs this file as it runs interpreted_gate_kernels.py.
"""

import pytest
import torch

from megasink.attention import VARIANTS, AttentionRequest, attention
from megasink.attention.call import Arriving, AttentionCall, Results, Slot, Slotted
from megasink.attention.custom_op import slot_attention_backward_op, slot_attention_op
from megasink.attention.gate_kernels import OWN, choose_gate_kernels
from megasink.attention.kernels.aten_cpu import FlashCpuBackend
from tests.attention.attention_oracle import check, make_case
from tests.attention.interpreted_gate_kernels import BF16, _on_a_cpu, small_case
from tests.attention.stand_ins import stand_in_for

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


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries", [37, 36, 12])
@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-4"])
def test_packed_documents_in_one_call(name, queries, window, monkeypatch):
    """Documents of one and of several programs; with fewer queries, they begin before them."""
    stand_in_for(monkeypatch, name)
    head_dim = 256 if queries == 37 else 16  # 8 rows a program, or 128
    case = make_case(batch=1, tokens=queries, keys=37, head_dim=head_dim, dtype=BF16)
    mask = {"window": window, "cu_seqlens": (0, 1, 9, 9, 20, 21, 29, 37)}
    for variant in ("vanilla", "sink"):
        check(case, BF16, variant, backend=f"{name}+triton", roundings=4, **mask)


@pytest.mark.parametrize("absent", [(), ("grad_lse",), ("grad_gate",)])
@pytest.mark.parametrize("name", ["flash-attn-4", "transformer-engine"])
def test_op_around_a_kernel_with_its_own_sink(name, absent, monkeypatch):
    """With the gradient of the LSE as an argument, and injected."""
    stand_in_for(monkeypatch, name)
    case = small_case(tokens=37, dtype=BF16).with_(**dict.fromkeys(absent))
    assert choose_gate_kernels(AttentionRequest("cpu", BF16, 16, "sink"), name).name == OWN
    for variant in ("sink", "off-by-one"):
        check(case, BF16, variant, backend=name)


@pytest.mark.parametrize("name", ["flash-attn-2", "flash-attn-4"])
def test_op_around_a_kernel_that_writes_its_gradients_behind_the_first_row(name, monkeypatch):
    stand_in_for(monkeypatch, name)
    for tokens, keys, options in ((37, 37, {}), (5, 37, {"window": 20}), (9, 9, {"prefix": 3})):
        case = small_case(tokens=tokens, keys=keys, heads=4, groups=2, dtype=BF16)
        check(case, BF16, "vanilla", backend=name, **options)
