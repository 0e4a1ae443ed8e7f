"""Prefixes, packed documents and biases by distance against the definition (P2.18 to P2.22).

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import math
from itertools import pairwise

import pytest
import torch

from megasink.attention import (
    VARIANTS,
    attention,
    first_key_gate,
    reference_attention,
    reference_slot_attention,
    slot_attention,
)
from megasink.attention.mask_blocks import plan_blocks
from megasink.errors import ConfigError
from tests.attention.attention_oracle import assert_at_most_twice_plain_error, check, make_case

pytestmark = pytest.mark.usefixtures("memory_of_nans")
LOW = [torch.float32, torch.bfloat16]
FLASH_AND_EAGER = ["flash-cpu", "eager"]
CU_SEQLENS = (0, 1, 9, 9, 20, 21, 29, 37)  # lengths 1, 8 (twice), 0, 11, 1: some share a call


@pytest.mark.parametrize("queries", [1, 4, 8, 9])
def test_plans_of_prefixes_visit_each_visible_pair_once(queries):
    for prefix in range(2, 11):
        visits = torch.zeros(queries, 9, dtype=torch.int64)
        for block in plan_blocks(queries, 9, prefix=prefix):
            assert block.repeats == 1
            ones = torch.ones(block.queries, block.keys, dtype=torch.int64)
            part = ones.tril() if block.mask == "causal" else ones
            rows = slice(block.query, block.query + block.queries)
            visits[rows, block.key : block.key + block.keys] += part
        position = torch.arange(9)
        visible = (position <= position[9 - queries :, None]) | (position < prefix)
        assert torch.equal(visits, visible.long())


@pytest.mark.parametrize("backend", FLASH_AND_EAGER)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("prefix", [1, 2, 5, 50])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefix(variant, prefix, dtype, backend):
    case = make_case(sink=5.0 if prefix < 5 else -5.0, dtype=dtype)
    check(case, dtype, variant, backend=backend, prefix=prefix)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefix_with_more_keys_than_queries(variant):
    for queries in (1, 11, 28):
        for prefix in (2, 10, 20, 29):
            case = make_case(tokens=queries, keys=29)
            check(case, torch.float32, variant, prefix=prefix)


def test_a_prefix_opens_the_gate_of_the_first_token():
    case = make_case(dtype=torch.float64)
    tensors = (case.query, case.key, case.value)
    gate = attention(*tensors, prefix=3).gate_BHT
    assert (gate[..., :3] > 0).all()
    assert (attention(*tensors, prefix=1).gate_BHT[..., 0] == 0).all()


@pytest.mark.parametrize("backend", FLASH_AND_EAGER)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_documents(variant, window, dtype, backend):
    case = make_case(sink=5.0 if window else None, dtype=dtype)
    mask = {"window": window, "cu_seqlens": CU_SEQLENS}
    # Documents of one token: see the oracle on roundings.
    check(case, dtype, variant, backend=backend, roundings=4, **mask)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_rows_of_a_pack(variant, window, dtype):
    """A chunk of a context-parallel rank: its first document may have begun before it."""
    for queries in (1, 3, 16, 36):
        case = make_case(sink=5.0 if window else None, dtype=dtype, tokens=queries, keys=37)
        mask = {"window": window, "cu_seqlens": CU_SEQLENS}
        check(case, dtype, variant, roundings=4, **mask)
        tensors = [t.float() for t in (case.query, case.key, case.value)]
        if variant == "vanilla" and dtype is torch.float32:
            _, lse, gate = attention(*tensors, **mask)
            torch.testing.assert_close(first_key_gate(*tensors[:2], lse, **mask), gate)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_document_knows_nothing_of_its_neighbours(variant):
    """Nor of its place in the pack: the same as attention over the document alone, to the bit."""
    case = make_case(batch=1)
    sink = case.sink.float() if variant == "sink" else None
    tensors = [t.float() for t in (case.query, case.key, case.value)]
    packed = attention(*tensors, variant=variant, sink_H=sink, cu_seqlens=CU_SEQLENS)
    for start, stop in pairwise(sorted(set(CU_SEQLENS))):
        parts = (t[:, :, start:stop] for t in tensors)
        alone = attention(*parts, variant=variant, sink_H=sink)
        for ours, expected in zip(packed, alone, strict=True):
            torch.testing.assert_close(ours[:, :, start:stop], expected, rtol=1e-6, atol=1e-6)
    if variant == "vanilla":
        starts = list(CU_SEQLENS[:-1])
        assert (packed.gate_BHT[..., starts] == 0).all()
        others = [t for t in range(37) if t not in starts]
        assert (packed.gate_BHT[..., others] > 0).all()


def test_documents_lie_in_memory_as_megatron_wants_them():
    case = make_case(batch=1, tokens=21)
    views = [t.float().permute(2, 0, 1, 3).contiguous() for t in (case.query, case.key, case.value)]
    out = attention(*(v.permute(1, 2, 0, 3) for v in views), cu_seqlens=(0, 5, 21)).out_BHTD
    assert out.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ((0, 5), "must rise from 0 to 8 "),
        ((1, 8), "must rise from 0 to 8 "),
        ((0, 6, 5, 8), "must rise from 0 to 8 "),
        ((), "must rise from 0 to 8 "),
    ],
)
def test_wrong_boundaries_are_refused(cu_seqlens, message):
    query = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=message):
        attention(query, query, query, cu_seqlens=cu_seqlens)


def evaluate_biased(function, case, dtype, variant, bias, **mask):
    """As `evaluate`, and the gradient of the bias."""
    leaf = bias.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    tensors = [t.to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
    statistics = leaf.dtype
    inputs = {"query": tensors[0], "key": tensors[1], "value": tensors[2], "bias": leaf}
    if variant == "sink":
        inputs["sink"] = mask["sink_H"] = case.sink.to(statistics).requires_grad_()
    outputs = function(*tensors, variant=variant, distance_bias_HS=leaf, **mask)
    arriving = (case.grad_out, case.grad_lse, case.grad_gate)
    total = sum((o * g.to(o.dtype)).sum() for o, g in zip(outputs, arriving, strict=True))
    grads = torch.autograd.grad(total, list(inputs.values()))
    named = dict(zip(("out", "lse", "gate"), (o.detach().double() for o in outputs), strict=True))
    return named | {f"d {n}": g.double() for n, g in zip(inputs, grads, strict=True)}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bias(variant, window, dtype):
    for groups, tokens, keys in ((2, 37, 37), (1, 37, 37), (4, 9, 29), (2, 1, 29), (2, 1, 1)):
        if window is not None and tokens != keys:
            continue
        case = make_case(groups=groups, tokens=tokens, keys=keys, dtype=dtype, sink=4.0)
        # Longer than the keys, and far from flat: a bias of 0 would hide everything.
        bias = 3.0 * torch.randn(4, keys + 3, generator=torch.Generator().manual_seed(1))
        arguments = (case, dtype, variant, bias.double())
        ours = evaluate_biased(attention, *arguments, window=window)
        plain = evaluate_biased(reference_attention, *arguments, window=window)
        exact = evaluate_biased(
            reference_attention, case, torch.float64, variant, bias.double(), window=window
        )
        # The backward computes weights again from the LSE, here 10 and more, whose last digit is
        # that many roundings of every weight of its row; autograd keeps the weights themselves.
        assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=8)
        assert (ours["d bias"][:, keys:] == 0).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_bias_over_more_than_one_chunk_and_in_documents(variant):
    case = make_case(batch=1, heads=2, groups=1, tokens=300)
    bias = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).double()
    for mask in ({}, {"window": 130}, {"cu_seqlens": (0, 270, 285, 300)}):
        for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
            ours = evaluate_biased(attention, case, dtype, variant, bias, **mask)
            exact = evaluate_biased(reference_attention, case, torch.float64, variant, bias, **mask)
            for name, tensor in exact.items():
                error = (ours[name] - tensor).norm() / tensor.norm()
                assert error <= tolerance, (name, error)


def test_a_slot_of_any_logit_and_value_under_every_mask():
    """Key and key-value biases (P2): a logit that depends on the query."""
    case = make_case(batch=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(4, 37, generator=generator, dtype=torch.float64)
    slot_key, slot_value = torch.randn(2, 4, 1, 16, generator=generator, dtype=torch.float64)
    for mask in ({"prefix": 4}, {"cu_seqlens": CU_SEQLENS}, {"distance_bias_HS": bias}):
        results = []
        for function in (slot_attention, reference_slot_attention):
            leaves = [
                t.clone().requires_grad_()
                for t in (case.query, case.key, case.value, slot_key, slot_value)
            ]
            logit = (leaves[0] * leaves[3]).sum(-1) / 4
            out, lse, gate = function(*leaves[:3], logit, leaves[4][None], **mask)
            loss = (out * case.grad_out).sum() + (lse * case.grad_lse).sum()
            loss = loss + (gate * case.grad_gate).sum()
            results.append((out, lse, gate, *torch.autograd.grad(loss, leaves)))
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_gates_of_any_size_under_a_bias():
    """A bias of -60 on every key but the first: gates of 1e-20 are kept."""
    case = make_case(batch=1, tokens=8)
    bias = torch.full((4, 8), -60.0)
    query = torch.zeros_like(case.query).float()
    key, value = case.key.float(), case.value.float()
    for position in range(1, 8):
        row = bias.clone()
        row[:, position] = 0.0  # the distance to key 0
        gate = attention(query, key, value, distance_bias_HS=row).gate_BHT[0, :, position]
        expected = position * math.exp(-60.0)
        torch.testing.assert_close(gate, torch.full_like(gate, expected), rtol=1e-5, atol=0.0)


def test_a_bias_that_depends_on_distance_alone_moves_with_the_tokens():
    """Translation: the last rows over a window are the first rows of the text that starts there."""
    case = make_case(batch=1, tokens=40, dtype=torch.float64)
    bias = torch.randn(4, 40, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    options = {"distance_bias_HS": bias, "window": 6, "variant": "off-by-one"}
    whole = attention(case.query, case.key, case.value, **options)
    shifted = attention(*(t[:, :, 13:] for t in (case.query, case.key, case.value)), **options)
    # From the sixth on every token sees the same six.
    torch.testing.assert_close(shifted.out_BHTD[:, :, 5:], whole.out_BHTD[:, :, 18:])
    torch.testing.assert_close(shifted.lse_BHT[:, :, 5:], whole.lse_BHT[:, :, 18:])


def test_repeated_tokens_without_positions_attend_uniformly():
    """P2.45: alpha = 1/t for every key, so the gate of the t-th token is 1 - 1/t."""
    vector = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    query = key = vector.expand(1, 1, 23, 16)
    value = torch.randn(1, 1, 23, 16, dtype=torch.float64)
    counts = torch.arange(1, 24, dtype=torch.float64)
    out, _, gate = attention(query, key, value)
    torch.testing.assert_close(gate[0, 0], 1 - 1 / counts)
    torch.testing.assert_close(out[0, 0], value[0, 0].cumsum(0) / counts[:, None])
    gate = attention(query, key, value, prefix=5).gate_BHT
    torch.testing.assert_close(gate[0, 0], 1 - 1 / counts.clamp(min=5))
    gate = attention(query, key, value, window=4).gate_BHT
    torch.testing.assert_close(gate[0, 0, :4], 1 - 1 / counts[:4])
    assert (gate[0, 0, 4:] == 1).all()  # the window hides key 0 (P2.19)


@pytest.mark.parametrize(
    "mask",
    [
        {"prefix": 5},
        {"cu_seqlens": CU_SEQLENS},
        {"cu_seqlens": CU_SEQLENS, "window": 3},
        {"distance_bias_HS": torch.linspace(2.0, -2.0, 4 * 37).view(4, 37)},
    ],
    ids=["prefix", "documents", "documents-window", "bias"],
)
def test_the_gate_from_the_lse_alone(mask):
    case = make_case()
    tensors = [t.float() for t in (case.query, case.key, case.value)]
    _, lse, gate = attention(*tensors, **mask)
    torch.testing.assert_close(first_key_gate(*tensors[:2], lse, **mask), gate)


def test_masks_without_meaning_are_refused():
    query = torch.randn(1, 2, 8, 4)
    few = query[:, :, :3]
    bias = torch.zeros(2, 8)
    for problem, options in {
        "prefix -1": {"prefix": -1},
        "be combined with window": {"prefix": 3, "window": 2},
        "be combined with cu_seqlens": {"prefix": 3, "cu_seqlens": (0, 8)},
        "be combined with distance_bias_HS": {"prefix": 3, "distance_bias_HS": bias},
        "be combined with causal=False": {"prefix": 3, "causal": False},
        r"must be \[2, keys\]": {"distance_bias_HS": bias[:1]},
        "torch.float32": {"distance_bias_HS": bias.double()},
        "has 4 distances, but 8 are needed": {"distance_bias_HS": bias[:, :4]},
        "has 4 distances, but 5 are needed": {
            "distance_bias_HS": bias[:, :4],
            "cu_seqlens": (0, 5, 8),
        },
    }.items():
        with pytest.raises(ValueError, match=problem):
            attention(query, query, query, **options)
    with pytest.raises(ValueError, match="call attention once for each document"):
        attention(few, query, query, cu_seqlens=(0, 8), causal=False)
    with pytest.raises(ValueError, match=r"8 queries .* not 3"):
        attention(query, few, few, cu_seqlens=(0, 3))
    with pytest.raises(ConfigError, match="needs the causal mask"):
        attention(query, query, query, distance_bias_HS=bias, causal=False)
    with pytest.raises(ConfigError, match="does not support a distance bias; use 'eager'"):
        attention(query, query, query, distance_bias_HS=bias, backend="flash-cpu")
