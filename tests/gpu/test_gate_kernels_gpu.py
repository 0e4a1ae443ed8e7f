"""The Triton gate kernels on a GPU, against PyTorch's operations and the float64 reference.

What the interpreter cannot show (tests/attention/interpreted_gate_kernels.py): the hardware's
rounding and its exponential, and that the warps of a program keep out of each other's way.
"""

import pytest
import torch

from megasink.attention import VARIANTS, apply_gate, choose_backend, gate_values
from megasink.attention.call import Arriving, Results
from megasink.attention.gate_kernels import choose_gate_kernels, gate_kernels_named
from megasink.attention.injection import inject_lse_gradient
from megasink.attention.kernels import AttentionRequest
from megasink.attention.kernels.cuda import at_runtime
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, check, make_case

BF16 = torch.bfloat16
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _supported():
    reason = choose_gate_kernels(at_runtime(AttentionRequest("cuda", BF16, 64), 0)).reasons
    if "triton" in reason:
        pytest.skip(f"triton: {reason['triton']}")


def _rows(*shape, dtype=BF16):
    batch, heads, tokens, head_dim = shape
    rows = torch.randn(tokens, batch, heads, head_dim, device="cuda").to(dtype)
    return rows.permute(1, 2, 0, 3)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
def test_injected_rows_are_pytorchs_to_the_bit_and_put_back(head_dim, dtype):
    """Many programs, and again and again: a race between warps would show."""
    shape = (2, 8, 4099, head_dim)
    logits = torch.linspace(-30, 30, shape[2], device="cuda").expand(shape[:3])
    gate, weight = logits.sigmoid().contiguous(), (-logits).sigmoid().contiguous()
    sink = torch.zeros(1, 8, 1, device="cuda")
    for seed in range(20):
        torch.manual_seed(seed)
        results = Results(_rows(*shape, dtype=dtype), torch.zeros_like(gate), gate, weight)
        sizes = 10.0 ** torch.randint(-30, 9, shape[:3], device="cuda")
        grad_out = _rows(*shape, dtype=dtype)
        grad_out[:, 1], grad_out[:, 2, :, 0] = 0.0, 0.0
        grad_lse = torch.randn(shape[:3], device="cuda") * sizes
        before = grad_out.clone(), results.out_BHTD.clone()
        wanted = inject_lse_gradient(grad_out, results.out_BHTD, grad_lse)
        opened = gate_kernels_named("triton").slot_backward(
            Arriving(grad_out, grad_lse, None), results, sink, None, inject=True
        )
        with opened as given:
            assert torch.equal(given.grad_out_BHTD, wanted[0])
            assert torch.equal(given.out_BHTD, wanted[1])
        assert torch.equal(grad_out, before[0])
        assert torch.equal(results.out_BHTD, before[1])


@pytest.mark.parametrize("gates", ["triton", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_are_exact(variant, gates):
    kernel = choose_backend(at_runtime(AttentionRequest("cuda", BF16, 64), 0)).name
    for head_dim, tokens in ((64, 257), (128, 1000)):
        case = make_case(head_dim=head_dim, tokens=tokens, dtype=BF16, device="cuda")
        check(case, BF16, variant, backend=f"{kernel}+{gates}")


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 80])
def test_explicit_gates(width, dtype):
    x, grad_out = (_rows(2, 8, 1000, 80, dtype=dtype) for _ in range(2))
    score = _rows(2, 8, 1000, width, dtype=dtype) * 10

    def run(function, wide):
        leaves = [t.detach().to(wide).requires_grad_() for t in (x, score)]
        out, gate = function(*leaves)
        grads = torch.autograd.grad([out, gate], leaves, [grad_out.to(wide), gate.detach()])
        names = ("out", "gate", "dx", "dscore")
        return {n: t.detach().double() for n, t in zip(names, (out, gate, *grads), strict=True)}

    def definition(x, score):
        gate = gate_values(score, "sigmoid")
        return apply_gate(x, gate, "multiply"), gate.mean(-1)

    kernels = gate_kernels_named("triton")
    ours = run(lambda x, score: kernels.gate_rows(x, score, "sigmoid", "multiply"), dtype)
    exact = run(definition, torch.float64)
    assert_at_most_twice_plain_error(ours, run(definition, dtype), exact, dtype)
