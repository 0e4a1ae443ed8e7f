"""The CUDA kernels where sizes, memory and numbers are unusual, against the float64 reference."""

import pytest
import torch

from megasink.attention import VARIANTS, attention, reference_attention
from tests.attention.attention_oracle import (
    assert_at_most_twice_plain_error,
    check,
    evaluate,
)
from tests.gpu.cases import BF16, KERNELS, MARKS, cuda_case, needs
from tests.gpu.cases import supported as _supported  # noqa: F401  (a fixture)

pytestmark = MARKS


def leaves_of(case):
    return [t.to(BF16).requires_grad_() for t in (case.query, case.key, case.value)]


def sinks_of(case, variant):
    return case.sink.float() if variant == "sink" else None


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_output_gradient_in_the_memory_of_the_output(variant, kernel):
    """As out.backward(out.detach()) sends it: gate kernels may not write into one as the other."""
    case = cuda_case(tokens=130)
    grads = {}
    for name in ("shared", "copied", "exact"):
        wide = name == "exact"
        leaves = [t.double().detach().requires_grad_() if wide else t for t in leaves_of(case)]
        options = {} if wide else {"backend": kernel}
        sink = sinks_of(case, variant)
        call = reference_attention if wide else attention
        sink = sink.double() if wide and sink is not None else sink
        out, lse, gate = call(*leaves, variant=variant, sink_H=sink, **options)
        arriving = out.detach() if name == "shared" else out.detach().clone()
        arriving = [arriving, *(g.to(lse.dtype) for g in (case.grad_lse, case.grad_gate))]
        found = torch.autograd.grad([out, lse, gate], leaves, arriving)
        grads[name] = {f"d {n}": g.double() for n, g in zip("qkv", found, strict=True)}
    assert_at_most_twice_plain_error(grads["shared"], grads["copied"], grads["exact"], BF16)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_log_sum_exps_far_below_zero(variant, kernel):
    """All scores are around -120, so that an exponential without its maximum would be 0.

    As it is, in float32, beside off-by-one's slot, whose logit is 0.
    """
    case = cuda_case(tokens=130, sink=-118.0)
    query, key = case.query.clone(), case.key.clone()
    query[..., 0], key[..., 0] = -31.0, 31.0
    ours = check(case.with_(query=query, key=key), BF16, variant, backend=kernel)
    assert ours["lse"].max() < -90


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 130), (64, 200)])
@pytest.mark.parametrize("window", [None, 90])
def test_rectangles_through_autograd(queries, keys, window, variant, kernel):
    case = cuda_case(tokens=queries, keys=keys)
    check(case, BF16, variant, backend=kernel, window=window, roundings=4 if queries == 1 else 1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("queries", [193, 100])
def test_packed_documents(queries, variant, kernel):
    """Each attends only to itself, also one of a single token; two have the same length."""
    case = cuda_case(batch=1, tokens=queries, keys=193)
    check(case, BF16, variant, backend=kernel, cu_seqlens=(0, 64, 65, 129, 193), roundings=4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits_twice(variant, kernel):
    """With torch.use_deterministic_algorithms, gradients of many blocks are added in one order."""
    needs(kernel, deterministic=True)
    case = cuda_case(tokens=1030, groups=1)
    torch.use_deterministic_algorithms(True)
    try:
        one, two = (evaluate(attention, case, BF16, variant, backend=kernel) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert {name for name, tensor in one.items() if not torch.equal(tensor, two[name])} == set()


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_than_two_billion_elements(kernel):
    """The last sequence, beyond what 32 bits address, is what it is in a call of its own."""
    batch, heads, tokens, head_dim = 64, 64, 4104, 128
    assert batch * heads * tokens * head_dim > 2**31
    free, _ = torch.cuda.mem_get_info()
    if free < 75 * 2**30:
        pytest.skip(f"needs 75 GiB of free memory, the device has {free / 2**30:.0f}")
    torch.manual_seed(0)
    last = [torch.randn(1, heads, tokens, head_dim, device="cuda").to(BF16) for _ in range(4)]
    sink = torch.randn(heads, device="cuda")

    def gradients(repeats):
        query, key, value, grad_out = (
            torch.zeros(repeats, *t.shape[1:], device="cuda", dtype=BF16) for t in last
        )
        for tensor, one in zip((query, key, value, grad_out), last, strict=True):
            tensor[-1:] = one
        leaves = [t.requires_grad_() for t in (query, key, value)]
        out, lse, gate = attention(*leaves, variant="sink", sink_H=sink, backend=kernel)
        ones = torch.ones_like(lse)
        grads = torch.autograd.grad([out, lse, gate], leaves, [grad_out, ones, ones])
        return [t[-1:].double().cpu() for t in (out.detach(), lse, gate, *grads)]

    for ours, alone in zip(gradients(batch), gradients(1), strict=True):
        # A backward that adds dq up in no fixed order may differ by roundings.
        assert (ours - alone).norm() <= 2**-8 * alone.norm()
