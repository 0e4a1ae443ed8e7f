"""Similarity kernels against their definitions: outputs, the proxy weight, every gradient."""

import pytest
import torch

from megasink.attention import (
    SIMILARITIES,
    reference_similarity_attention,
    similarity_attention,
)
from megasink.attention.similarity import NORMALIZATIONS
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, make_case

LOW = [torch.float32, torch.bfloat16]
NAMES = ("d query", "d key", "d value", "d first", "d second")


def evaluate(function, case, dtype, similarity, normalization, gain=1.0, **options):
    """Outputs and all gradients as float64, by name; `gain` multiplies the queries."""
    tensors = [gain * case.query, case.key, case.value]
    tensors = [t.to(dtype).requires_grad_() for t in tensors]
    mlp = None
    if similarity == "mlp":
        generator = torch.Generator().manual_seed(1)
        shape = (case.query.shape[-1],) * 2
        drawn = [0.5 * torch.randn(shape, generator=generator) for _ in range(2)]
        mlp = tuple(t.bfloat16().to(dtype).requires_grad_() for t in drawn)
    names = {"similarity": similarity, "normalization": normalization, "mlp": mlp}
    out, first = function(*tensors, **names, **options)
    gradients = torch.autograd.grad(out, [*tensors, *(mlp or ())], case.grad_out.to(out.dtype))
    named = {"out": out, "first": first} | dict(zip(NAMES, gradients, strict=False))
    return {name: t.detach().double() for name, t in named.items()}


def check(case, dtype, similarity, normalization, gain=1.0, **options):
    arguments = (similarity, normalization, gain)
    ours = evaluate(similarity_attention, case, dtype, *arguments, **options)
    plain = evaluate(reference_similarity_attention, case, dtype, *arguments, **options)
    exact = evaluate(reference_similarity_attention, case, torch.float64, *arguments, **options)
    # Dividing by a signed sum: the row whose sum cancels most has most of the error, and whether
    # ours or theirs is the larger there is luck.
    signed = normalization == "row-sum" and similarity in ("identity", "mlp")
    roundings = 16 if signed else 2
    assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=roundings)
    return ours


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_outputs_and_gradients(similarity, normalization, dtype):
    for groups, tokens, gain in ((4, 37, 1.0), (2, 37, 8.0), (1, 48, 8.0), (2, 1, 1.0)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, similarity, normalization, gain)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_masks_and_fewer_queries_than_keys(similarity, normalization):
    for queries, keys in ((37, 37), (11, 29), (1, 29)):
        case = make_case(tokens=queries, keys=keys)
        for options in ({}, {"window": 5}, {"window": 1}, {"causal": False}, {"scale": 0.7}):
            check(case, torch.float32, similarity, normalization, **options)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_longer_than_one_chunk(similarity):
    for window in (None, 130, 300):
        case = make_case(batch=1, heads=2, groups=1, tokens=600, head_dim=8)
        # Among 1200 rows there is always a signed one whose sum cancels to nothing.
        normalization = "none" if similarity in ("identity", "mlp") else "row-sum"
        check(case, torch.float32, similarity, normalization, window=window)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_float64_is_exact(similarity, normalization):
    case = make_case(tokens=23, dtype=torch.float64)
    arguments = (case, torch.float64, similarity, normalization, 3.0)
    exact = evaluate(reference_similarity_attention, *arguments)
    for name, tensor in evaluate(similarity_attention, *arguments).items():
        torch.testing.assert_close(tensor, exact[name], rtol=1e-11, atol=1e-11, msg=name)


def test_both_sides_of_the_clamp_are_tested():
    """max(|sum|, 1): rows below and above 1, of both signs, are in the cases above."""
    case = make_case(tokens=37)
    ones = case.with_(value=torch.ones_like(case.value))
    sums = evaluate(reference_similarity_attention, ones, torch.float64, "identity", "none")["out"]
    assert (sums > 1).any()
    assert (sums < -1).any()
    assert (sums.abs() < 1).any()


def test_rows_without_any_weight():
    """A dead ReLU, or a sigmoid that underflows: 0 over 1e-8, in forward and in backward."""
    query = torch.full((1, 1, 6, 4), 50.0, requires_grad=True)
    key = torch.full((1, 1, 6, 4), -50.0, requires_grad=True)
    dead = torch.zeros(4, 4)
    for similarity, mlp in (("sigmoid", None), ("elu-plus-one", None), ("mlp", (dead, dead))):
        out, first = similarity_attention(
            query, key, torch.ones(1, 1, 6, 4), similarity=similarity, mlp=mlp
        )
        assert (out == 0).all()
        assert (first == 0).all()
        for grad in torch.autograd.grad(out.sum(), (query, key)):
            assert grad.isfinite().all()


def test_the_memory_order_of_the_query_is_kept():
    mixed = torch.randn(19, 3, 4, 24)
    views = [t.permute(1, 2, 0, 3) for t in mixed.split(8, dim=-1)]
    out = similarity_attention(*views, similarity="sigmoid").out_BHTD
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"similarity": "cosine"}, "unknown similarity 'cosine': choose sigmoid"),
        ({"similarity": "sigmoid", "normalization": "l2"}, "unknown normalization 'l2'"),
        ({"similarity": "mlp"}, "pass mlp if and only if"),
        ({"similarity": "sigmoid", "mlp": ()}, "pass mlp if and only if"),
        ({"similarity": "sigmoid", "window": 3, "causal": False}, "needs the causal mask"),
    ],
)
def test_refused(options, message):
    case = make_case()
    with pytest.raises(ValueError, match=message):
        similarity_attention(case.query, case.key, case.value, **options)
