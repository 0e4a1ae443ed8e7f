"""The CUDA kernels against the float64 reference, and CUDA graphs.

The same checks as tests/attention, for the kernels that a CPU does not have: FlashAttention 2 to 4
(with their own sliding window and GQA) and cuDNN (with windows made of blocks), from PyTorch and
from packages where those are installed.
"""

import pytest
import torch

from megasink.attention import (
    VARIANTS,
    AttentionCall,
    BackwardTensors,
    attention,
    choose_backend,
    reference_attention,
)
from megasink.attention.gate_kernels import plain_gate_kernels as definition
from megasink.attention.kernels import AttentionRequest, backend_named
from megasink.attention.kernels.cuda import at_runtime
from megasink.attention.masked import backward_masked, forward_masked
from megasink.errors import ConfigError
from tests.attention.attention_oracle import (
    assert_at_most_twice_plain_error,
    check,
    evaluate,
)
from tests.gpu.cases import BF16, INJECTED, KERNELS, MARKS, cuda_case, needs
from tests.gpu.cases import supported as _supported  # noqa: F401  (a fixture)

pytestmark = MARKS


@pytest.fixture
def allow_tf32():
    """Allows or forbids TF32 until the test ends. (pytest's monkeypatch cannot undo this one.)"""
    before = torch.backends.cuda.matmul.allow_tf32
    yield lambda allowed: setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 1, 16, 100, 300])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant, window, kernel):
    for groups, tokens in ((4, 257), (2, 257), (1, 128), (2, 2), (2, 1)):
        case = cuda_case(groups=groups, tokens=tokens)
        check(case, BF16, variant, window=window, backend=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [40, 64, 72, 96, 128, 192, 256])
def test_head_dims(head_dim, kernel):
    needs(kernel, head_dim=head_dim)
    check(cuda_case(head_dim=head_dim, tokens=130), BF16, "sink", backend=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_serves_the_other_dtypes(variant, dtype, allow_tf32):
    allow_tf32(False)
    case = cuda_case(dtype=dtype, tokens=300)
    if dtype is not torch.float64:
        check(case, dtype, variant, window=90, backend="eager")
        return
    ours = evaluate(attention, case, dtype, variant, window=90, backend="eager")
    for name, exact in evaluate(reference_attention, case, dtype, variant, window=90).items():
        torch.testing.assert_close(ours[name], exact, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sink", [-30.0, 30.0])
def test_large_sinks(sink, kernel):
    """Gates near 0 keep their digits, outside of kernels that add the sink themselves."""
    backend = f"{kernel}+torch" if backend_named(kernel).takes_sink else kernel
    ours = check(cuda_case(sink=sink), BF16, "sink", backend=backend)
    assert (ours["gate"] > 0).all()
    assert ours["d sink"].abs().min() > 0


@pytest.mark.parametrize("kernel", [n for n in KERNELS if backend_named(n).takes_sink])
@pytest.mark.parametrize("sink", [-30.0, 30.0])
def test_large_sinks_in_the_kernel(sink, kernel):
    """The error of the gate is that of the LSE, absolute (docs/maths.md)."""
    case, results = cuda_case(sink=sink), []
    for function, dtype, options in (
        (attention, BF16, {"backend": kernel}),
        (reference_attention, BF16, {}),
        (reference_attention, torch.float64, {}),
    ):
        results.append(evaluate(function, case, dtype, "sink", **options))
    gates = [result.pop("gate") for result in results]
    assert (gates[0] - gates[2]).abs().max() <= 8 * abs(sink) * torch.finfo(torch.float32).eps
    rows = case.query.shape[0] * case.query.shape[2]
    sums = [result.pop("d sink") for result in results]
    allowed = 2 * (sums[1] - sums[2]).abs() + rows * 2**-8 * gates[2].mean((0, 2)) + rows * 2e-5
    assert ((sums[0] - sums[2]).abs() <= allowed).all()
    assert_at_most_twice_plain_error(*results, BF16, roundings=4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gates_do_not_depend_on_tf32(kernel, allow_tf32):
    """NVIDIA's images allow it; a logit of 20 in TF32 would change the gate by about 1%."""
    case = cuda_case(tokens=200)
    case = case.with_(query=20.0 * case.query)
    gates = []
    for allowed in (True, False):
        allow_tf32(allowed)
        gates.append(evaluate(attention, case, BF16, "vanilla", backend=kernel)["gate"])
    assert torch.equal(*gates)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-10])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_without_output_gradient(variant, size, kernel):
    case = cuda_case(tokens=200)
    grad_out = (case.grad_out * size).to(BF16).double()
    grad_out[:, :, 3:150] = 0.0
    case = case.with_(
        grad_out=grad_out,
        grad_lse=(case.grad_lse * size).float().double(),
        grad_gate=(case.grad_gate * size).float().double(),
    )
    check(case, BF16, variant, backend=kernel)
    masked = [
        {"d query": evaluate(function, case, dtype, variant, **options)["d query"][:, :, 3:150]}
        for function, dtype, options in (
            (attention, BF16, {"backend": kernel}),
            (reference_attention, BF16, {}),
            (reference_attention, torch.float64, {}),
        )
    ]
    assert_at_most_twice_plain_error(*masked, BF16)


@pytest.mark.parametrize("kernel", KERNELS)
def test_first_token_has_gate_zero_and_zero_gradients(kernel):
    case = cuda_case()
    grad_gate = torch.zeros_like(case.grad_gate)
    grad_gate[:, :, 0] = 1.0
    case = case.with_(grad_out=None, grad_lse=None, grad_gate=grad_gate)
    ours = evaluate(attention, case, BF16, "vanilla", backend=kernel)
    assert (ours["gate"][:, :, 0] == 0).all()
    for name in ("d query", "d key", "d value"):
        assert (ours[name] == 0).all(), name


@pytest.mark.parametrize("kernel", INJECTED)
def test_an_op_that_drops_the_lse_gradient_is_caught(monkeypatch, kernel):
    monkeypatch.setattr(definition, "inject_lse_gradient", lambda grad_out, out, _: (grad_out, out))
    for variant in VARIANTS:
        with pytest.raises(AssertionError, match="d query"):
            check(cuda_case(), BF16, variant, backend=f"{kernel}+torch")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("queries", [8, 64, 200])
def test_rectangles(queries, kernel):
    """Bottom-right causal: in one call, or as a full rectangle and a causal square."""
    case = cuda_case(tokens=queries, keys=200)
    tensors = [t.to(BF16) for t in (case.query, case.key, case.value)]
    call = AttentionCall(None, scale=0.125)
    backend = backend_named(kernel)
    out, lse = forward_masked(backend, *tensors, call)
    arriving = BackwardTensors(case.grad_out.to(BF16), *tensors, out, lse)
    *grads, _, _ = backward_masked(backend, arriving, call)
    ours = dict(zip(("out", "d query", "d key", "d value"), (out, *grads), strict=True))
    only_out = case.with_(grad_lse=None, grad_gate=None)
    expected = [
        evaluate(reference_attention, only_out, dtype, "vanilla", scale=0.125)
        for dtype in (BF16, torch.float64)
    ]
    assert_at_most_twice_plain_error(
        {name: tensor.double() for name, tensor in ours.items()},
        *({name: result[name] for name in ours} for result in expected),
        BF16,
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_refuse_causal_rectangles(kernel):
    query = torch.zeros(1, 2, 8, 64, device="cuda", dtype=BF16)
    key = torch.zeros(1, 2, 16, 64, device="cuda", dtype=BF16)
    backend = backend_named(kernel)
    if backend.bottom_right:  # takes fewer queries than keys, not more
        query, key = key, query
    with pytest.raises(ValueError, match="must be square"):
        backend.forward(query, key, key, AttentionCall(None, scale=1.0))


def test_float16_trains_on_the_kernel_that_takes_the_lse_gradient():
    request = at_runtime(AttentionRequest("cuda", torch.float16, 64), 0)
    name = choose_backend(request).name
    assert name == "eager" or backend_named(name).takes_lse_gradient
    for variant in VARIANTS:
        check(cuda_case(dtype=torch.float16, tokens=130), torch.float16, variant)


@pytest.mark.parametrize("kernel", INJECTED)
def test_float16_is_refused_where_a_gradient_needs_injection(kernel):
    query = torch.zeros(1, 2, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with pytest.raises(ConfigError, match="float16 cannot hold"):
        attention(query, query, query, backend=kernel)
    out = attention(query, query, query, backend=kernel, with_gate=False).out_BHTD
    out.sum().backward()


def _leaves(case, layout):
    """Query, key and value as leaves of [b, h, s, d], or views of [s, b, h, d] as Megatron's."""
    tensors = [t.to(BF16) for t in (case.query, case.key, case.value)]
    if layout == "sbhd":
        tensors = [t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in tensors]
    return [t.requires_grad_() for t in tensors]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_layout(variant, kernel):
    case = cuda_case(tokens=130)
    results = []
    for layout in ("bhsd", "sbhd"):
        leaves = _leaves(case, layout)
        sink = case.sink.float() if variant == "sink" else None
        out, _, gate = attention(*leaves, variant=variant, sink_H=sink, backend=kernel)
        if layout == "sbhd":
            assert out.permute(2, 0, 1, 3).is_contiguous()
        grads = torch.autograd.grad(out.float().square().sum() + gate.sum(), leaves)
        results.append([out, gate, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_graph(variant, window, kernel):
    """Forward and backward captured once and replayed on other values."""
    case, other = cuda_case(tokens=256), cuda_case(tokens=256, seed=1)
    leaves = _leaves(case, "bhsd")
    sink = case.sink.float().requires_grad_() if variant == "sink" else None
    inputs = [*leaves, *([] if sink is None else [sink])]
    grads_in = [
        case.grad_out.to(BF16),
        case.grad_lse.float(),
        case.grad_gate.float(),
    ]

    def step():
        outputs = attention(*leaves, variant=variant, sink_H=sink, window=window, backend=kernel)
        return [*outputs, *torch.autograd.grad(outputs, inputs, grads_in)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf, value in zip(leaves, (other.query, other.key, other.value), strict=True):
            leaf.copy_(value)
        grads_in[0][:, :, 10:90] = 0.0
    graph.replay()
    torch.cuda.synchronize()
    for ours, expected in zip(captured, step(), strict=True):
        # The backward kernels add dq up in no fixed order.
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_no_host_sync():
    case = cuda_case(tokens=256)
    leaves = _leaves(case, "bhsd")
    sink = case.sink.float().requires_grad_()

    def step():
        out, lse, gate = attention(*leaves, variant="sink", sink_H=sink)
        (out.sum() + lse.sum() + gate.sum()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiles_without_graph_breaks(variant):
    case = cuda_case(tokens=130)
    leaves = _leaves(case, "sbhd")
    sink = case.sink.float() if variant == "sink" else None

    def run(query, key, value):
        return attention(query, key, value, variant=variant, sink_H=sink)

    compiled = torch.compile(run, fullgraph=True)
    for ours, plain in zip(compiled(*leaves), run(*leaves), strict=True):
        torch.testing.assert_close(ours, plain)
        for one, other in zip(
            *(
                torch.autograd.grad(t.float().sum(), leaves, retain_graph=True)
                for t in (ours, plain)
            ),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
