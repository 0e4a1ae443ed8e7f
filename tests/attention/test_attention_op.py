"""The op as an op: layouts, torch.compile, PyTorch's own operator checks, memory."""

import collections
import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.attention import VARIANTS, AttentionCall, attention, functional
from megasink.attention import custom_op as slot_op
from megasink.attention.call import Slot
from megasink.attention.gate_kernels import plain_gate_kernels as definition
from tests.attention.attention_oracle import check, evaluate, make_case


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, 7])
def test_megatron_layout_is_kept_and_read_through_strides(variant, window):
    """Query, key and value as views of one [s, b, heads, 3 * d] tensor, as Megatron splits them."""
    tokens, batch, heads, dim = 19, 3, 4, 8
    mixed = torch.randn(tokens, batch, heads, 3 * dim, generator=torch.Generator().manual_seed(0))
    views = [t.permute(1, 2, 0, 3).requires_grad_() for t in mixed.split(dim, dim=-1)]
    sink = torch.zeros(heads, requires_grad=True) if variant == "sink" else None
    result = attention(*views, variant=variant, sink_H=sink, window=window)
    assert result.out_BHTD.permute(2, 0, 1, 3).is_contiguous()
    dense = [t.detach().contiguous().requires_grad_() for t in views]
    expected = attention(*dense, variant=variant, sink_H=sink, window=window)
    assert expected.out_BHTD.is_contiguous()
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    grads, expected_grads = (
        torch.autograd.grad(r.out_BHTD.square().sum() + r.gate_BHT.sum(), leaves)
        for r, leaves in ((result, views), (expected, dense))
    )
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_graph_breaks(variant):
    case = make_case(tokens=12)
    tensors = [t.float().requires_grad_() for t in (case.query, case.key, case.value)]
    sink = case.sink.float().requires_grad_() if variant == "sink" else None
    leaves = [*tensors, *([] if sink is None else [sink])]

    def run(query, key, value, sink):
        out, lse, gate = attention(query, key, value, variant=variant, sink_H=sink, window=5)
        return out.sin(), lse.sin(), gate.sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, plain in zip(compiled(*tensors, sink), run(*tensors, sink), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)
        gradients = [
            torch.autograd.grad(t.sum(), leaves, retain_graph=True, allow_unused=True)
            for t in (ours, plain)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("window", "bias"), [(None, False), (4, False), (4, True)])
@pytest.mark.parametrize("slot", list(Slot))
def test_operator_checks(slot, window, bias):
    """torch.library.opcheck: schema, autograd, fake tensors against real ones, dynamic shapes."""
    tokens, heads, groups, dim = 9, 4, 2, 8 - 2 * (window is None)  # values as wide, or narrower
    query = torch.randn(tokens, 2, heads, 8).permute(1, 2, 0, 3).requires_grad_()
    key, value = (torch.randn(2, groups, tokens, n).requires_grad_() for n in (8, dim))
    logit = value_ = None
    if slot == Slot.GIVEN:
        logit = torch.randn(1, heads, 1).requires_grad_()
        value_ = torch.randn(1, heads, 1, dim).requires_grad_()
    prefix = 0 if window or bias else 3
    bias_ = torch.randn(heads, tokens).requires_grad_() if bias else None
    call = AttentionCall(
        bias_, scale=0.3, prefix=prefix, window=window, slot=slot, needs_gate_gradient=True
    )
    inputs = (query, key, value, logit, value_)
    torch.library.opcheck(slot_op.slot_attention_op, (*inputs, *call))

    inputs = [None if t is None else t.detach() for t in inputs]
    call = call._replace(distance_bias_HS=None if bias_ is None else bias_.detach())
    results = slot_op.slot_attention_op(*inputs, *call)
    gate = None if slot == Slot.NONE else results[2]
    torch.library.opcheck(
        slot_op.slot_attention_backward_op,
        (results[0], results[1], gate, *inputs, *results, *call),
        # The backward has no backward of its own.
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_strides_are_those_that_compilers_are_told(variant, batch, width, monkeypatch):
    """torch.compile plans memory by the fake tensors' strides, those of size-1 dimensions too."""
    monkeypatch.setattr(functional, "_is_plain", lambda *_: False)  # the ops that compilers see
    monkeypatch.setattr("megasink.attention.op._owns", lambda _: False)
    real = torch.randn(6, batch, 4, 8).permute(1, 2, 0, 3)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
    strides = []
    for tensor in (real, fake):
        leaf = tensor.detach().requires_grad_()
        with mode if tensor is fake else contextlib.nullcontext():
            sink = torch.zeros(4) if variant == "sink" else None
            out, lse, gate = attention(leaf, leaf, leaf[..., :width], variant=variant, sink_H=sink)
            (grad,) = torch.autograd.grad(out.sum() + gate.sum(), leaf)
        strides.append([t.stride() for t in (out, lse, gate, grad)])
    assert strides[0] == strides[1]


@pytest.mark.parametrize("tokens_first", [False, True])
def test_an_eager_step_copies_no_gradient(tokens_first):
    """Each copy is time on the host: the LSE, and the output that the gradient of the LSE enters.

    The kernel has its own memory order, which autograd takes as it is.
    """
    shape = (6, 2, 4, 8) if tokens_first else (2, 4, 6, 8)
    order = (1, 2, 0, 3) if tokens_first else (0, 1, 2, 3)
    leaves = [torch.randn(shape).permute(order).detach().requires_grad_() for _ in range(3)]
    sink = torch.zeros(4, requires_grad=True)
    with torch.autograd.profiler.profile() as profile:
        out, _, gate = attention(*leaves, variant="sink", sink_H=sink)
        ones = [torch.ones_like(out), torch.ones_like(gate)]
        grads = torch.autograd.grad([out, gate], [*leaves, sink], ones)
    assert out.stride() == leaves[0].stride()
    assert [grad.shape for grad in grads] == [*(leaf.shape for leaf in leaves), (4,)]
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    events = profile.function_events
    within = {id(part) for event in events if event.name == kernel for part in _parts(event)}
    counts = collections.Counter(event.name for event in events if id(event) not in within)
    assert (counts[kernel], counts["aten::copy_"], counts["ViewBackward0"]) == (1, 2, 0)


def _parts(event):
    for part in event.cpu_children:
        yield part
        yield from _parts(part)


@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_calls_are_the_custom_op_to_the_bit(variant, monkeypatch):
    """Outputs and gradients of the autograd.Function around the same code."""
    case, found = make_case(groups=1, tokens=23, dtype=torch.bfloat16), []
    for is_plain in (functional._is_plain, lambda *_: False):
        monkeypatch.setattr(functional, "_is_plain", is_plain)
        found.append(evaluate(attention, case, torch.bfloat16, variant, window=9))
    for name, eager in found[0].items():
        assert torch.equal(eager, found[1][name]), name


class _Named(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_dispatch_modes_meet_the_custom_op(monkeypatch):
    """Selective checkpointing chooses it by its name."""
    query = torch.randn(1, 2, 5, 8, requires_grad=True)

    def refuse(*_):
        raise AssertionError("eager")

    monkeypatch.setattr(functional, "eagerly", refuse)
    with pytest.raises(AssertionError, match="eager"):
        attention(query, query, query)
    with _Named() as mode:
        attention(query, query, query)
    assert "megasink::slot_attention" in mode.names


def test_a_second_derivative_is_refused():
    case = make_case(tokens=5)
    tensors = [t.float().requires_grad_() for t in (case.query, case.key, case.value)]
    out = attention(*tensors).out_BHTD
    (grad,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()


def test_absent_gradients_cost_nothing(monkeypatch):
    """With no gradient on gate or LSE the injection is not run."""
    calls = []
    inject = definition.inject_lse_gradient
    monkeypatch.setattr(
        definition, "inject_lse_gradient", lambda *args: calls.append(1) or inject(*args)
    )
    for variant in VARIANTS:
        check(make_case().with_(grad_lse=None, grad_gate=None), torch.float32, variant)
    assert not calls
    check(make_case(), torch.float32, "sink")
    assert calls == [1]


@pytest.mark.parametrize(
    "defect",
    [
        lambda lse: lse.to(torch.bfloat16).float(),
        lambda lse: lse + 0.005,
        lambda lse: lse / math.log(2.0),
    ],
    ids=["rounded-to-bfloat16", "too-large", "base-2"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wrong_lse_of_16_bit_tensors_is_seen(variant, defect, monkeypatch):
    def wrong(*tensors, **options):
        found = attention(*tensors, **options)
        return found._replace(lse_BHT=defect(found.lse_BHT))

    monkeypatch.setattr("tests.attention.attention_oracle.attention", wrong)
    with pytest.raises(AssertionError, match="lse: error"):
        check(make_case(head_dim=64, dtype=torch.bfloat16, tokens=130), torch.bfloat16, variant)
