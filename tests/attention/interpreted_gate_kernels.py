"""The Triton gate kernels in Triton's interpreter, on CPU tensors.

`test_gate_kernels.py` runs this file in a process with TRITON_INTERPRET=1, which must be set before
Triton is imported. Memory that PyTorch does not initialize is filled with NaN.
"""

import pytest
import torch

from megasink.attention import (
    VARIANTS,
    apply_gate,
    attention,
    biased_attention,
    first_key_gate,
    gate_values,
    slot_attention,
)
from megasink.attention.call import Arriving, Results
from megasink.attention.gate_kernels import gate_kernels_named
from megasink.attention.gate_kernels.triton_gate_kernels import TritonGateKernels
from megasink.attention.injection import inject_lse_gradient
from megasink.attention.kernels import forget_choices
from megasink.attention.layout import empty_in_order_of
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, check, make_case

TRITON, PLAIN = gate_kernels_named("triton"), gate_kernels_named("torch")
BF16 = torch.bfloat16
HEAD_DIMS = [1, 40, 64, 80, 128, 256]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    """The kernels are willing to run on a CPU, and uninitialized memory is NaN."""
    monkeypatch.setattr(TritonGateKernels, "supports", lambda *_: None)
    forget_choices()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    forget_choices()


def _rows(*shape, dtype, layout="sbhd", scale=1.0):
    """[B, H, T, D] as a view of a dense tensor, or of one with unaligned rows ("sliced")."""
    batch, heads, tokens, head_dim = shape
    wide = torch.randn(tokens, batch, heads, head_dim + (3 if layout == "sliced" else 0)) * scale
    if layout == "bhsd":
        wide = torch.randn(batch, heads, tokens, head_dim).permute(2, 0, 1, 3) * scale
    return wide.to(dtype)[..., :head_dim].permute(1, 2, 0, 3)


def _results(*shape, dtype, layout="sbhd"):
    """Results of a forward with gates from 1e-13 to 1 - 1e-13."""
    logits = torch.linspace(-30, 30, shape[2]).expand(shape[:3])
    lse = torch.randn(shape[:3])
    out = _rows(*shape, dtype=dtype, layout=layout)
    return Results(out, lse, logits.sigmoid().contiguous(), (-logits).sigmoid().contiguous())


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((d, BF16) for d in HEAD_DIMS), (40, torch.float32)]
)
def test_injected_rows_are_pytorchs_to_the_bit(head_dim, dtype):
    """Gradients from 1e-30 to 1e8, dO of zero and below the floor; then everything is put back."""
    sizes = 10.0 ** torch.arange(-30, 9, 4, dtype=torch.float32)
    shape = (1, 4, len(sizes) ** 2, head_dim)
    results = _results(*shape, dtype=dtype)
    grad_out = _rows(*shape, dtype=torch.float32) * sizes.repeat(len(sizes))[:, None]
    grad_out[:, 1] = 0.0
    grad_out[:, 2, :, 0] *= 1e-15
    grad_out = grad_out.to(dtype)
    grad_lse = torch.randn(shape[:3]) * sizes.repeat_interleave(len(sizes))
    grad_lse[:, :, 7] = 0.0
    before = grad_out.clone(), results.out_BHTD.clone()
    wanted = inject_lse_gradient(grad_out, results.out_BHTD, grad_lse)
    arriving = Arriving(grad_out, grad_lse, None)
    with TRITON.slot_backward(arriving, results, None, None, inject=True) as given:
        assert torch.equal(given.grad_out_BHTD, wanted[0])
        assert torch.equal(given.out_BHTD, wanted[1])
        assert not torch.equal(given.out_BHTD, before[1])
        assert given.lse_grad_BHT is None
    assert torch.equal(grad_out, before[0])
    assert torch.equal(results.out_BHTD, before[1])


LAYOUTS = [
    *((head_dim, "sbhd", BF16) for head_dim in HEAD_DIMS),
    *((64, layout, BF16) for layout in ("bhsd", "sliced")),
    *((64, "sbhd", dtype) for dtype in (torch.float32, torch.float16)),
    (40, "bhsd", torch.float32),
]


@pytest.mark.parametrize(("head_dim", "layout", "dtype"), LAYOUTS)
def test_slot_against_float64(head_dim, layout, dtype):
    """Forward and gradients of the slot, beside PyTorch's in the same precision."""
    torch.manual_seed(head_dim)
    shape = (1, 3, 37, head_dim)
    query, out, grad_out = (_rows(*shape, dtype=dtype, layout=layout) for _ in range(3))
    lse, grad_lse = torch.randn(2, *shape[:3])
    logit = torch.randn(shape[:3]) + torch.tensor([-30.0, 0.0, 30.0])[:, None]
    arriving = (grad_out, grad_lse, torch.randn(1, 3, 1).expand(shape[:3]))

    def both_ways(kernels, value, wide=None):
        def cast(tensor):
            return tensor if tensor is None or wide is None else tensor.to(wide)

        u, s = cast(value), cast(logit)
        results = kernels.slot_forward(cast(query), cast(out).clone(), cast(lse), s, u)
        assert results.out_BHTD.permute(*_order(query)).is_contiguous()
        given = Arriving(*map(cast, arriving))
        with kernels.slot_backward(given, results, s, u, inject=False) as before:
            found = {"ds": before.logit_grad, "lse_grad": before.lse_grad_BHT}
            if value is not None:
                assert before.value_grad.shape == value.shape
                found["du"] = before.value_grad
        return {name: t.double() for name, t in {**results._asdict(), **found}.items()}

    for value in (None, torch.randn(1, 3, 1, head_dim), torch.randn(shape)):
        ours, plain = both_ways(TRITON, value), both_ways(PLAIN, value)
        exact = both_ways(PLAIN, value, torch.float64)
        assert_at_most_twice_plain_error(ours, plain, exact, dtype)
        # Of every token: at s = 30 the gate is 1e-13, and at -30 the weight of the slot.
        for name in ("gate_BHT", "weight_BHT"):
            torch.testing.assert_close(ours[name], exact[name], rtol=8e-6, atol=0)

    # The gradient of a logit that all tokens share is the sum of theirs.
    shared = torch.zeros(1, 3, 1)
    results = _results(*shape, dtype=dtype, layout=layout)
    sums = []
    for s in (shared, shared.expand(1, 3, 37)):
        with TRITON.slot_backward(Arriving(*arriving), results, s, None, inject=False) as before:
            sums.append(before.logit_grad.double())
    terms = sums[1].transpose(0, 1).flatten(1)
    assert sums[0].shape == shared.shape
    allowed = 2**-22 * terms.abs().sum(1)
    assert ((sums[0].flatten() - terms.sum(1)).abs() <= allowed).all()


def _order(like):
    """The dimensions from the outermost in memory."""
    return sorted(range(4), key=like.stride, reverse=True)


def small_case(**options):
    """The interpreter takes milliseconds per program: one program per head and launch."""
    return make_case(**{"batch": 1, "heads": 2, "groups": 1, **options})


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_op_outputs_and_gradients(variant, window):
    for dtype, groups, tokens in (
        (BF16, 1, 37),
        (torch.float32, 2, 33),
        (BF16, 1, 2),
        (BF16, 1, 1),
    ):
        case = small_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, variant, window=window, backend="flash-cpu+triton")


@pytest.mark.parametrize("variant", VARIANTS)
def test_op_other_masks_and_shapes(variant):
    options = {"backend": "auto+triton"}
    check(small_case(tokens=11, keys=29, dtype=BF16), BF16, variant, **options)
    check(small_case(tokens=20, keys=9), torch.float32, variant, causal=False, **options)
    check(small_case(tokens=9, keys=1, dtype=BF16), BF16, variant, causal=False, **options)
    check(small_case(tokens=23, head_dim=40, dtype=BF16), BF16, variant, prefix=5, **options)
    # More than one program per head, and a last one that is not full.
    case = make_case(batch=2, heads=2, tokens=133, head_dim=64, dtype=BF16)
    check(case, BF16, variant, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_op_values_narrower_than_keys(variant):
    """Latent attention: the first key's logit and gradient are wider than the output."""
    options = {"backend": "auto+triton"}
    for head_dim, value_dim, tokens, dtype in (
        (24, 16, 37, BF16),
        (40, 16, 23, torch.float32),
        (192, 128, 21, BF16),
        (24, 16, 1, BF16),
    ):
        sizes = {"head_dim": head_dim, "value_dim": value_dim, "tokens": tokens}
        check(small_case(**sizes, dtype=dtype), dtype, variant, **options)
    case = small_case(head_dim=24, value_dim=16, tokens=7, keys=19, dtype=BF16)
    check(case, BF16, variant, window=5, **options)


def _shares_close(ours, exact, lse):
    """Within the error of an LSE that includes the slot, a few of its roundings, absolute."""
    allowed = 4 * torch.finfo(torch.float32).eps * lse.abs().double().clamp(min=1.0)
    assert ((ours.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("sink", [-30.0, 0.0, 40.0])
def test_the_shares_of_a_sink_that_is_in_the_lse(sink):
    """For kernels with their own sink; views, several programs, odd lengths."""
    logit = sink + torch.randn(1, 2, 1)
    lse = torch.logaddexp(5 * torch.randn(2, 1031, 2).permute(0, 2, 1), logit)
    lse[:, :, 7] = logit[..., 0] - 1e-6  # an LSE' that rounding left below the sink
    gate, weight = TRITON.shares(lse, logit)
    difference = (logit.double() - lse).clamp(max=0.0)
    torch.testing.assert_close(gate.double(), -torch.expm1(difference), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(weight.double(), difference.exp(), rtol=1e-5, atol=0)
    assert (gate[:, :, 7] == 0).all()
    for ours, plain in zip((gate, weight), PLAIN.shares(lse, logit), strict=True):
        _shares_close(ours, plain.double(), lse)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"prefix": 4},
        {"cu_seqlens": (0, 9, 10, 10, 37)},
        {"cu_seqlens": (0, 20, 37), "window": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("queries", [37, 8])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_the_gate_of_the_first_key_in_one_launch(options, queries, head_dim, monkeypatch):
    case = small_case(heads=4, groups=2, tokens=queries, keys=37, head_dim=head_dim, dtype=BF16)
    query, key = (t.to(BF16) for t in (3 * case.query, case.key))
    lse = attention(query, key, key, backend="flash-cpu", **options).lse_BHT
    plain = first_key_gate(query, key, lse, **options)
    monkeypatch.setattr("megasink.attention.lse_statistics._in_triton", lambda _: True)
    gate = first_key_gate(query, key, lse, **options)
    torch.testing.assert_close(gate, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(gate == 0, plain == 0)
    assert torch.equal(gate == 1, plain == 1) or "window" not in options


@pytest.mark.parametrize("sink", [-30.0, 30.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_op_large_sinks(dtype, sink):
    ours = check(small_case(sink=sink, dtype=dtype), dtype, "sink", backend="auto+triton")
    assert (ours["gate"] > 0).all()
    assert ours["d sink"].abs().min() > 0


@pytest.mark.parametrize("size", [1.0, 1e-10])
@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_op_rows_without_output_gradient(variant, size):
    case = small_case(dtype=BF16)
    grad_out = (case.grad_out * size).to(BF16).double()
    grad_out[:, :, 3:20] = 0.0
    case = case.with_(
        grad_out=grad_out,
        grad_lse=(case.grad_lse * size).float().double(),
        grad_gate=(case.grad_gate * size).float().double(),
    )
    check(case, BF16, variant, backend="auto+triton")


def _differ(ours, plain, leaves, tolerance):
    """Outputs and gradients of two results are those of each other."""
    grads = [
        torch.autograd.grad([o.float().square().sum() for o in outputs], leaves)
        for outputs in (ours, plain)
    ]
    for one, other in zip((*ours, *grads[0]), (*plain, *grads[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_other_slots_and_packed_documents():
    """Biases have a logit per token, and values; their gradients have other shapes."""
    leaves = [torch.randn(1, n, 23, 16, requires_grad=True) for n in (4, 2, 2)]
    bias = torch.randn(4, 16, requires_grad=True)

    def both(function, *inputs, **options):
        return [function(*inputs, backend=f"auto+{n}", **options) for n in ("triton", "torch")]

    keys = {"key_bias_HD": bias, "value_bias_HD": bias}
    _differ(*both(biased_attention, *leaves, **keys), [*leaves, bias], 1e-4)
    logit = torch.randn(1, 4, 23, requires_grad=True)
    value = torch.randn(1, 4, 23, 16, requires_grad=True)
    slots = [*leaves, logit, value]
    _differ(*both(slot_attention, *slots), slots, 1e-4)
    packed = {"cu_seqlens": [0, 5, 6, 23]}
    _differ(*both(attention, *leaves, **packed), leaves, 1e-4)


def test_gradients_whose_memory_is_shared_or_not_dense():
    """out.sum().backward() sends a gradient of one element, seen from everywhere."""
    leaves = [torch.randn(2, 4, 23, 16, dtype=BF16).requires_grad_() for _ in range(3)]
    sink = torch.zeros(4, requires_grad=True)
    for reduce in (lambda out: out.sum(), lambda out: (out.mT.contiguous() ** 2).sum()):
        grads = []
        for name in ("triton", "torch"):
            out, _, gate = attention(*leaves, variant="sink", sink_H=sink, backend=f"auto+{name}")
            grads.append(torch.autograd.grad(reduce(out) + gate.sum(), [*leaves, sink]))
        for ours, plain in zip(*grads, strict=True):
            torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def test_the_same_bits_every_time():
    case = small_case(tokens=133, head_dim=64, dtype=BF16)
    runs = [check(case, BF16, "vanilla", backend="auto+triton") for _ in range(2)]
    for name in runs[0]:
        assert torch.equal(runs[0][name], runs[1][name]), name


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("activation", "operation"),
    [
        ("sigmoid", "multiply"),
        ("ns-sigmoid", "multiply"),
        ("silu", "add"),
        ("identity", "multiply"),
    ],
)
@pytest.mark.parametrize(("head_dim", "width", "layout"), [(40, 1, "sliced"), (64, 64, "sbhd")])
def test_explicit_gates_against_float64(head_dim, width, layout, activation, operation, dtype):
    """Scores of +-30 among them; a gradient on the mean gate as the balance loss sends it."""
    shape = (1, 2, 37, head_dim)
    x, grad_out = (_rows(*shape, dtype=dtype, layout=layout) for _ in range(2))
    score = _rows(*shape[:3], width, dtype=dtype, layout=layout, scale=10.0)
    score[:, 0, :3], score[:, 0, 3:6] = 30.0, -30.0
    grad_gate = torch.randn(1, 2, 1)

    def definition(x, score):
        gate = gate_values(score, activation)
        return apply_gate(x, gate, operation), gate.mean(-1)

    def run(function, wide=dtype):
        leaves = [t.detach().to(wide).requires_grad_() for t in (x, score)]
        out, gate = function(*leaves)
        arriving = [grad_out.to(wide), grad_gate.to(gate.dtype).expand(gate.shape)]
        grads = torch.autograd.grad([out, gate], leaves, arriving)
        assert out.stride() == empty_in_order_of(leaves[0]).stride()
        names = ("out", "gate", "dx", "dscore")
        return {n: t.detach().double() for n, t in zip(names, (out, gate, *grads), strict=True)}

    ours = run(lambda x, score: TRITON.gate_rows(x, score, activation, operation))
    plain, exact = run(definition), run(definition, torch.float64)
    assert_at_most_twice_plain_error(ours, plain, exact, dtype)
    if activation == "sigmoid" and width == 1:
        torch.testing.assert_close(ours["gate"], exact["gate"], rtol=4e-6, atol=0)
