"""Triton's gate kernels on tensors of more than 2**31 elements, as on a large GPU; interpreted.

`test_gate_kernels.py` runs this file as it runs interpreted_gate_kernels.py. The memory between two
rows has no pages, so that few megabytes are used. Not covered: what hardware does with the offsets.
"""

import mmap

import pytest
import torch

from megasink.attention import attention
from megasink.attention.gate_kernels import gate_kernels_named, slot_launch, triton_shares
from tests.attention.interpreted_gate_kernels import BF16, _on_a_cpu

__all__ = ["_on_a_cpu"]  # the fixture of every test here, too

# A shape, an axis, and the elements between two of its steps: the last one is farther away than
# 2**31, to where products of 32-bit numbers do not reach; or one step alone is.
FAR = {
    "batch": ((3, 1, 130, 8), 0, 2**30 + 64),
    "head": ((1, 3, 130, 8), 1, 2**30 - 64),
    "token": ((1, 1, 390, 8), 2, 2**23 - 64),
    "one": ((2, 1, 5, 8), 0, 2**31 + 8),
}
NORESERVE = 0x4000  # of Linux; in the module mmap since Python 3.13


@pytest.fixture(params=FAR)
def shape(request):
    return FAR[request.param][0]


@pytest.fixture
def same(request):
    """Runs on tensors, and on copies of them with these distances along one axis."""
    _, axis, apart = FAR[request.node.callspec.params["shape"]]

    def far(tensor):
        strides = list(tensor.contiguous().stride())
        # Without the head dim, a program has more tokens.
        strides[axis] = apart if axis < 2 or tensor.dim() == 4 else apart // 4
        elements = 1 + sum(s * (n - 1) for s, n in zip(strides, tensor.shape, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        memory = mmap.mmap(-1, elements * tensor.element_size(), flags=flags)
        view = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides)
        return view.copy_(tensor)

    def compared(run, tensors):
        for ours, wanted in zip(run(*map(far, tensors)), run(*tensors), strict=True):
            assert torch.equal(ours, wanted)

    return compared


def _given(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape).to(BF16) for shape in shapes]


@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_attention(variant, shape, same):
    sink = torch.zeros(shape[1], requires_grad=True) if variant == "sink" else None

    def run(query, key, value, grad_out, grad_lse, grad_gate):
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        outputs = attention(*leaves, variant=variant, sink_H=sink, backend="flash-cpu+triton")
        inputs = leaves if sink is None else [*leaves, sink]
        before = grad_out.clone()
        grads = torch.autograd.grad(outputs, inputs, (grad_out, grad_lse, grad_gate))
        assert torch.equal(grad_out, before)
        return *outputs, *grads

    same(run, [*_given(*[shape] * 4), *torch.randn(2, *shape[:3])])


@pytest.mark.parametrize("by_element", [False, True])
def test_explicit_gates(by_element, shape, same):
    def run(x, score, grad_out, grad_gate):
        leaves = [t.detach().requires_grad_() for t in (x, score)]
        outputs = gate_kernels_named("triton").gate_rows(*leaves, "sigmoid", "multiply")
        return *outputs, *torch.autograd.grad(outputs, leaves, (grad_out, grad_gate))

    score = shape if by_element else (*shape[:3], 1)
    same(run, [*_given(shape, score, shape), torch.randn(shape[:3])])


def test_the_gate_of_the_first_key(shape, same):
    def run(query, key, lse):
        options = {"alone": True, "window": None}
        return [triton_shares.first_key_gate(query, key, lse, None, 0.2, **options)]

    same(run, [*_given(shape, shape), torch.randn(shape[:3]) + 4.0])


def test_tokens_farther_apart_than_a_program_reaches_are_refused():
    tensor = torch.empty(0, dtype=BF16).as_strided((0, 1, 2, 8), (8, 8, 2**31 // 256, 1))
    with pytest.raises(ValueError, match="8388608 elements apart"):
        slot_launch.strides(tensor)
