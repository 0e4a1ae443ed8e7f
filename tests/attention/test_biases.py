"""Key and value biases against the definition, which has an extra key column."""

import pytest
import torch

from megasink.attention import biased_attention, reference_biased_attention
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, make_case

KINDS = {"k-bias": (True, False), "kv-bias": (True, True), "v-bias": (False, True)}
LOW = [torch.float32, torch.bfloat16]


def evaluate(function, case, dtype, kind, size, biases=None, **options):
    """Outputs and all gradients as float64, by name."""
    tensors = [t.to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
    generator = torch.Generator().manual_seed(1)
    statistics = torch.promote_types(dtype, torch.float32)
    shape = (case.query.shape[1], case.query.shape[-1])
    drawn = [size * torch.randn(shape, generator=generator) for _ in range(2)]
    # Both precisions get the same numbers, as a definition in bf16 would round them.
    drawn = [t.bfloat16().to(statistics).requires_grad_() for t in drawn]
    names = ("key_bias_HD", "value_bias_HD")
    given = {n: t for n, t, on in zip(names, drawn, KINDS[kind], strict=True) if on}
    outputs = function(*tensors, **given, **options)
    arriving = (case.grad_out, case.grad_lse, case.grad_gate)
    leaves = [*tensors, *given.values()]
    gradients = torch.autograd.grad(
        outputs, leaves, [g.to(o.dtype) for g, o in zip(arriving, outputs, strict=True)]
    )
    named = dict(zip(("out", "lse", "gate"), outputs, strict=True))
    named |= dict(zip(("d query", "d key", "d value", *given), gradients, strict=True))
    return {name: t.detach().double() for name, t in named.items()}


def check(case, dtype, kind, size, backend="auto", **options):
    ours = evaluate(biased_attention, case, dtype, kind, size, backend=backend, **options)
    plain = evaluate(reference_biased_attention, case, dtype, kind, size, **options)
    exact = evaluate(reference_biased_attention, case, torch.float64, kind, size, **options)
    roundings = 4 if case.key.shape[2] <= 2 else 1
    assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=roundings)
    return ours


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", [0.02, 5.0])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind, size, dtype, backend):
    for groups, tokens in ((4, 37), (2, 37), (1, 48), (2, 1)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, kind, size, backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"window": 5}, {"causal": False}, {"scale": 0.3}], ids=["window", "full", "scale"]
)
def test_masks_and_scales(kind, options):
    check(make_case(), torch.float32, kind, 3.0, **options)


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_queries_than_keys(kind, tokens):
    """As in generation: the last query stands at the last key, and the bias is seen by all."""
    case = make_case(tokens=tokens, keys=29)
    check(case, torch.float32, kind, 3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_exact(kind):
    case = make_case(tokens=23, dtype=torch.float64)
    ours = evaluate(biased_attention, case, torch.float64, kind, 5.0)
    exact = evaluate(reference_biased_attention, case, torch.float64, kind, 5.0)
    for name, tensor in exact.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_the_logit_of_a_half_precision_query_is_float32():
    """k* in bf16 would move a logit near 40 by up to 0.1, and the gate by a tenth with it."""
    query = torch.full((1, 1, 4, 64), 2.0, dtype=torch.bfloat16)
    key = torch.zeros_like(query)
    bias = torch.full((1, 64), 2.51)
    gate = biased_attention(query, key, key, key_bias_HD=bias).gate_BHT
    logit = torch.tensor(2.0 * 2.51 * 64 / 8)
    expected = torch.sigmoid(torch.arange(1, 5).log() - logit)
    torch.testing.assert_close(gate[0, 0], expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:2], r"\[4, 16\] in torch.float32, got \[2, 16\]"),
        (lambda b: b.bfloat16(), "in torch.bfloat16"),
    ],
)
def test_a_bias_of_another_shape_or_dtype_is_refused(change, message):
    case = make_case()
    tensors = [t.float() for t in (case.query, case.key, case.value)]
    with pytest.raises(ValueError, match=message):
        biased_attention(*tensors, key_bias_HD=change(torch.zeros(4, 16)))
