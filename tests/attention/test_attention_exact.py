"""`attention` against the float64 reference: outputs and every gradient.

Covers the CPU; CUDA kernels have the same checks in tests/gpu.
"""

import pytest
import torch

from megasink.attention import (
    VARIANTS,
    attention,
    reference_attention,
    reference_slot_attention,
    slot_attention,
)
from megasink.attention.gate_kernels import plain_gate_kernels as definition
from tests.attention.attention_oracle import (
    assert_at_most_twice_plain_error,
    check,
    evaluate,
    make_case,
)

pytestmark = pytest.mark.usefixtures("memory_of_nans")
LOW = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant, window, dtype, backend):
    for groups, tokens in ((4, 37), (2, 37), (1, 48), (2, 2), (2, 1)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, variant, window=window, backend=backend)


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_longer_than_one_eager_chunk(variant, backend):
    case = make_case(batch=1, heads=2, groups=1, tokens=300)
    for window in (None, 130):
        check(case, torch.float32, variant, window=window, backend=backend)


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_is_exact(variant, window, backend):
    case = make_case(batch=1, tokens=23, dtype=torch.float64)
    case = case.with_(grad_out=case.grad_out.clone())
    case.grad_out[:, :, 5:9] = 0.0
    options = {"window": window}
    ours = evaluate(attention, case, torch.float64, variant, backend=backend, **options)
    exact = evaluate(reference_attention, case, torch.float64, variant, **options)
    for name, tensor in exact.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_narrower_than_keys(variant, dtype, backend):
    """As in latent attention; under every mask, and from queries in Megatron's layout too."""
    for sizes, options in (
        ({"head_dim": 24, "value_dim": 16}, {}),
        ({"head_dim": 24, "value_dim": 1, "groups": 4}, {"window": 5}),
        ({"head_dim": 24, "value_dim": 16, "tokens": 1, "keys": 9}, {}),
        ({"head_dim": 24, "value_dim": 16, "tokens": 11, "keys": 29}, {"causal": False}),
        ({"head_dim": 24, "value_dim": 16, "tokens": 11, "keys": 29}, {"window": 7}),
        ({"head_dim": 24, "value_dim": 16}, {"prefix": 5}),
        ({"head_dim": 24, "value_dim": 16}, {"cu_seqlens": (0, 20, 37)}),
        ({"head_dim": 192, "value_dim": 128}, {}),
    ):
        case = make_case(dtype=dtype, **sizes)
        if dtype is torch.float64:
            ours, exact = (
                evaluate(f, case, dtype, variant, **options, **more)
                for f, more in ((attention, {"backend": backend}), (reference_attention, {}))
            )
            for name, tensor in exact.items():
                torch.testing.assert_close(ours[name], tensor, rtol=1e-12, atol=1e-12, msg=name)
        else:
            check(case, dtype, variant, backend=backend, **options)


def test_a_slot_value_is_as_wide_as_the_values():
    case = make_case(head_dim=24, value_dim=16, dtype=torch.float64)
    logit = torch.randn(2, 4, 37, dtype=torch.float64).requires_grad_()
    tensors = [t.clone().requires_grad_() for t in (case.query, case.key, case.value)]
    for shape in ((2, 4, 37, 16), (1, 4, 1, 16)):
        value = torch.randn(shape, dtype=torch.float64).requires_grad_()
        leaves, documents = [*tensors, logit, value], (0, 11, 22, 37)
        grads = []
        for function in (slot_attention, reference_slot_attention):
            result = function(*leaves, cu_seqlens=documents)
            grads.append(torch.autograd.grad(result, leaves, (case.grad_out, *result[1:])))
            assert result.out_BHTD.shape == case.grad_out.shape
        for ours, exact in zip(*grads, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_more_keys_than_queries(variant, causal):
    case = make_case(tokens=11, keys=29)
    check(case, torch.float32, variant, causal=causal)


@pytest.mark.parametrize("keys", [1, 37])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bidirectional(variant, keys):
    check(make_case(tokens=37, keys=keys), torch.float32, variant, causal=False)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("sink", [-30.0, 30.0])
def test_large_sinks(sink, dtype):
    ours = check(make_case(sink=sink, dtype=dtype), dtype, "sink")
    assert (ours["gate"] > 0).all()
    assert ours["d sink"].abs().min() > 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_gates_of_1e_20(dtype):
    """Where the first key takes all, 1 - A_i0 is still known to the precision of the LSE."""
    case = make_case(dtype=dtype, groups=4)
    logit = 46.0 * case.query.shape[-1] ** 0.5
    first = torch.zeros_like(case.key[:, :, 0])
    first[..., 0] = 16.0
    query = case.query.clone()
    query[..., 0] = logit / 16.0
    key = case.key.clone()
    key[..., 0] = 0.0
    key[:, :, 0] = first
    case = case.with_(query=query.to(dtype).double(), key=key)
    exact = evaluate(reference_attention, case, torch.float64, "vanilla")
    gate = exact["gate"][:, :, 1:]
    assert gate.max() < 1e-16
    assert gate.min() < 1e-19
    # A loss on log G: its gradient at the gate is as large as the gate is small.
    grad_gate = torch.zeros_like(exact["gate"])
    grad_gate[:, :, 1:] = (1.0 / gate).float().double()
    case = case.with_(grad_gate=grad_gate)
    ours = check(case, dtype, "vanilla")
    relative = (ours["gate"][:, :, 1:] - gate).abs() / gate
    # LSE and logit are float32 numbers near 46, half a unit there is 1.9e-6, and exp keeps it;
    # aten's CPU kernel sums half-precision softmaxes to about 1e-4.
    assert relative.max() < (4 * 1.9e-6 if dtype is torch.float32 else 2e-4)


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
def test_first_token_has_gate_zero_and_zero_gradients(backend):
    case = make_case()
    grad_gate = torch.zeros_like(case.grad_gate)
    grad_gate[:, :, 0] = 1.0
    case = case.with_(grad_out=None, grad_lse=None, grad_gate=grad_gate)
    ours = evaluate(attention, case, torch.float32, "vanilla", backend=backend)
    assert (ours["gate"][:, :, 0] == 0).all()
    for name in ("d query", "d key", "d value"):
        assert (ours[name] == 0).all(), name


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-10, 1e-14])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_without_output_gradient(variant, size, dtype):
    """Tokens masked out of the loss: dO is exactly 0, or far below the gate's gradient."""
    case = make_case(dtype=dtype)
    grad_out = (case.grad_out * size).to(dtype).double()
    grad_out[:, :, 3:20] = 0.0
    grad_out[:, :, 20:24] *= 2.0**-34
    case = case.with_(
        grad_out=grad_out,
        grad_lse=(case.grad_lse * size).float().double(),
        grad_gate=(case.grad_gate * size).float().double(),
    )
    check(case, dtype, variant)
    for rows in (slice(3, 20), slice(20, 24)):
        only = {}
        for name, function, precision in (
            ("ours", attention, dtype),
            ("plain", reference_attention, dtype),
            ("exact", reference_attention, torch.float64),
        ):
            result = evaluate(function, case, precision, variant)["d query"]
            only[name] = {"d query": result[:, :, rows]}
        assert_at_most_twice_plain_error(only["ours"], only["plain"], only["exact"], dtype)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 1e3, 1e6])
def test_gate_gradients_of_other_sizes_than_output_gradients(ratio, dtype):
    case = make_case(dtype=dtype)
    case = case.with_(grad_gate=(case.grad_gate * ratio).float().double(), grad_lse=None)
    for variant in VARIANTS:
        check(case, dtype, variant)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-10])
@pytest.mark.parametrize("output", ["gate", "lse"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_on_one_statistic_alone(variant, output, size, dtype):
    """dO is 0 for every token, or does not arrive at all."""
    case = make_case(dtype=dtype)
    grad = (case.grad_gate * size).float().double()
    zero = torch.zeros_like(case.grad_out)
    case = case.with_(grad_out=zero, grad_lse=None, grad_gate=None).with_(
        **{f"grad_{output}": grad}
    )
    plain = evaluate(reference_attention, case, dtype, variant)
    exact = evaluate(reference_attention, case, torch.float64, variant)
    assert (exact.pop("d value") == 0).all()
    plain.pop("d value")
    for grad_out in (zero, None):
        ours = evaluate(attention, case.with_(grad_out=grad_out), dtype, variant)
        # The values have no gradient; the injection leaves 2**-30 of the LSE gradients there.
        left_over = ours.pop("d value").abs().max()
        assert left_over <= 2.0**-29 * grad.abs().sum((1, 2)).max()
        assert_at_most_twice_plain_error(ours, plain, exact, dtype)


def test_an_op_that_drops_the_lse_gradient_is_caught(monkeypatch):
    """What flash kernels do when their LSE is differentiated: every check above would fail."""
    monkeypatch.setattr(
        definition, "inject_lse_gradient", lambda grad_out, out, lse_grad: (grad_out, out)
    )
    for variant in VARIANTS:
        with pytest.raises(AssertionError, match="d query"):
            check(make_case(), torch.float32, variant)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_floor_that_does_not_scale_with_the_gradient_is_caught(monkeypatch, dtype):
    """A fixed floor under |dO| looks right for gradients near 1 and is wrong at their real size."""
    from megasink.attention import injection

    def fixed_floor(grad_out, out, lse_grad):
        at_one = lse_grad * 2.0**-40 / lse_grad.abs().clamp_min(2.0**-40)
        return injection.inject_lse_gradient(grad_out, out, at_one)

    monkeypatch.setattr(definition, "inject_lse_gradient", fixed_floor)
    case = make_case(dtype=dtype)
    case = case.with_(
        grad_out=torch.zeros_like(case.grad_out),
        grad_gate=(case.grad_gate * 1e-10).float().double(),
        grad_lse=None,
    )
    with pytest.raises(AssertionError, match="d query"):
        check(case, dtype, "sink")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("shape", ["key bias", "key-value bias", "sink"])
def test_any_slot(shape, window):
    """Key biases and key-value biases (P2) are slots whose logit depends on the query."""
    results = {}
    for name, function, dtype in (
        ("ours", slot_attention, torch.float32),
        ("plain", reference_slot_attention, torch.float32),
        ("exact", reference_slot_attention, torch.float64),
    ):
        case = make_case()
        tensors = [t.to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
        generator = torch.Generator().manual_seed(1)
        bias_HD, value_HD = (
            torch.randn(4, 16, generator=generator).to(dtype).requires_grad_() for _ in range(2)
        )
        logit = torch.einsum("bhtd,hd->bht", tensors[0], bias_HD)
        if shape == "sink":
            logit = bias_HD[None, :, :1]
        u = value_HD[None, :, None] if shape == "key-value bias" else None
        leaves = [*tensors, bias_HD] + ([value_HD] if u is not None else [])
        outputs = function(*tensors, logit, u, window=window)
        grads = (case.grad_out, case.grad_lse, case.grad_gate)
        gradients = torch.autograd.grad(
            outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
        )
        results[name] = {str(i): t.double() for i, t in enumerate((*outputs, *gradients))}
    assert_at_most_twice_plain_error(
        results["ours"], results["plain"], results["exact"], torch.float32
    )


def test_without_gate():
    for variant in VARIANTS:
        case = make_case().with_(grad_gate=None)
        ours = evaluate(attention, case, torch.float32, variant, with_gate=False)
        assert "gate" not in ours
        plain = evaluate(reference_attention, case, torch.float32, variant)
        exact = evaluate(reference_attention, case, torch.float64, variant)
        del plain["gate"], exact["gate"]
        assert_at_most_twice_plain_error(ours, plain, exact, torch.float32)


def test_statistics_are_float32_for_half_precision():
    case = make_case(dtype=torch.bfloat16)
    tensors = [t.bfloat16() for t in (case.query, case.key, case.value)]
    out, lse, gate = attention(*tensors, variant="sink", sink_H=case.sink.float())
    assert (out.dtype, lse.dtype, gate.dtype) == (torch.bfloat16, torch.float32, torch.float32)
