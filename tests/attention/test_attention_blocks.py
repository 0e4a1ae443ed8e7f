"""The block primitive: plans, rectangles, merges."""

import pytest
import torch

from megasink.attention import AttentionCall, BackwardTensors
from megasink.attention.kernels import backend_named
from megasink.attention.kernels.eager import EagerBackend
from megasink.attention.mask_blocks import merge_, plan_blocks
from megasink.attention.masked import backward_masked, forward_masked
from tests.attention.attention_oracle import make_case


def visible_pairs(queries: int, keys: int, window: int | None) -> torch.Tensor:
    """How often the plan visits each (query, key) pair."""
    visits = torch.zeros(queries, keys, dtype=torch.int64)
    for block in plan_blocks(queries, keys, window):
        ones = torch.ones(block.queries, block.keys, dtype=torch.int64)
        mask = {"full": ones, "causal": ones.tril(), "anticausal": ones.triu()}[block.mask]
        for i in range(block.repeats):
            row, column = block.query + i * block.stride, block.key + i * block.stride
            visits[row : row + block.queries, column : column + block.keys] += mask
    return visits


def test_plans_visit_each_visible_pair_once():
    for tokens in range(1, 14):
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        for window in (None, *range(1, tokens + 2)):
            visible = (distance >= 0) & (distance < (window or tokens))
            assert torch.equal(visible_pairs(tokens, tokens, window), visible.long())
    for queries in range(1, 8):
        distance = torch.arange(9 - queries, 9)[:, None] - torch.arange(9)
        assert torch.equal(visible_pairs(queries, 9, None), (distance >= 0).long())


def test_plans_of_windows_on_rectangles_visit_each_visible_pair_once():
    """A token at the end of a cache, a chunk of a context-parallel rank."""
    for keys in range(1, 14):
        for queries in range(1, keys + 1):
            distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
            for window in range(1, keys + 2):
                visible = (distance >= 0) & (distance < window)
                assert torch.equal(visible_pairs(queries, keys, window), visible.long())


def test_plans_refuse_what_they_do_not_hold():
    with pytest.raises(ValueError, match="need at least as many keys"):
        plan_blocks(3, 2)


@pytest.mark.parametrize("name", ["flash-cpu", "eager"])
def test_kernels_refuse_causal_rectangles(name):
    """aten's CPU kernel would answer with a mask aligned at the other corner."""
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="must be square"):
        backend_named(name).forward(query, key, key, AttentionCall(None, scale=1.0))


@pytest.mark.parametrize("name", ["flash-cpu", "eager"])
@pytest.mark.parametrize("queries", [1, 7, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_rectangles(causal, queries, name):
    """Few queries, many keys (decoding, context parallelism), in float64."""
    case = make_case(tokens=queries, keys=20, dtype=torch.float64)
    tensors = [t.requires_grad_() for t in (case.query, case.key, case.value)]
    query, key, value = tensors
    scores = 0.4 * query @ key.repeat_interleave(2, 1).mT
    if causal:
        hidden = torch.ones(queries, 20, dtype=torch.bool).triu(20 - queries + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    expected_out = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    expected_grads = torch.autograd.grad(expected_out, tensors, case.grad_out)

    backend, inputs = backend_named(name), [t.detach() for t in tensors]
    call = AttentionCall(None, scale=0.4, causal=causal)
    out, lse = forward_masked(backend, *inputs, call)
    tensors = BackwardTensors(case.grad_out, *inputs, out, lse)
    *grads, bias_grad, _ = backward_masked(backend, tensors, call)
    torch.testing.assert_close(out, expected_out.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach(), rtol=1e-12, atol=1e-12)
    assert bias_grad is None
    for grad, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11)


class WindowedEager(EagerBackend):
    """As a kernel that knows windows, and causal masks on square blocks only."""

    native_window = True


@pytest.mark.parametrize("backend", [EagerBackend(), WindowedEager()])
def test_a_window_at_the_end_of_a_cache(backend):
    case = make_case(tokens=1, keys=20, dtype=torch.float64)
    call = AttentionCall(None, scale=0.4, window=6)
    out, lse = forward_masked(backend, case.query, case.key, case.value, call)
    seen = (case.query, case.key[:, :, -6:], case.value[:, :, -6:])
    plain = AttentionCall(None, scale=0.4, causal=False)
    expected_out, expected_lse = backend.forward(*seen, plain)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_merge_with_a_side_that_saw_nothing():
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2, 1), -torch.inf)
    other_out, other_lse = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2, 1)
    merge_(out, lse, other_out, other_lse)
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)
    merge_(out, lse, torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2, 1), -torch.inf))
    assert torch.equal(out, other_out)
    assert torch.equal(lse, other_lse)
