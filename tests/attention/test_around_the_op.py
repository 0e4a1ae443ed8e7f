"""The op in autocast and in functorch's transforms, and inputs that kernels would misread."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vjp, vmap

from megasink.attention import (
    SIMILARITIES,
    VARIANTS,
    attention,
    biased_attention,
    similarity_attention,
    slot_attention,
)
from tests.attention.attention_oracle import evaluate, make_case
from tests.attention.test_attention_op import _Named


def inputs(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, n, 7, 8, generator=generator) for n in (4, 2, 2)]


def loss(*tensors):
    out, lse, gate = attention(*tensors)
    return (out.square().sum() + lse.sum() + gate.square().sum()).sin()


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_changes_nothing(variant, backend, window):
    """Its products of float32 tensors would have 8 bits, forward and backward."""
    case, options = make_case(), {"backend": backend, "window": window}
    plain = evaluate(attention, case, torch.float32, variant, **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = evaluate(attention, case, torch.float32, variant, **options)
    for name, value in plain.items():
        assert torch.equal(cast[name], value), name


def test_autocast_changes_no_key_bias():
    """Its logit is a product, too."""
    query, key, value = inputs(1)
    results = []
    for enabled in (False, True):
        biases = [torch.linspace(-1, 1, 32).view(4, 8).requires_grad_() for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            given = {"key_bias_HD": biases[0], "value_bias_HD": biases[1]}
            out, lse, gate = biased_attention(query, key, value, **given)
            grads = torch.autograd.grad(out.sum() + lse.sum() + gate.sum(), biases)
        results.append((out, lse, gate, *grads))
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_autocast_changes_no_similarity(similarity):
    leaves = [tensor.requires_grad_() for tensor in inputs(1)]
    mlp = (torch.eye(8) * 0.5, torch.ones(8, 8) * 0.3) if similarity == "mlp" else None
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = similarity_attention(*leaves, similarity=similarity, mlp=mlp).out_BHTD
        # The gradient of a linear layer is PyTorch's own.
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled and mlp is None):
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for plain, cast in zip(*results, strict=True):
        torch.testing.assert_close(cast, plain, rtol=1e-5, atol=1e-6)


def test_transforms_of_functorch():
    """A custom op has none of these derivatives, and vmap of them calls it for each element."""
    every = inputs(3, 1)
    each = list(zip(*every, strict=True))
    wanted = []
    for tensors in each:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        wanted.append(torch.autograd.grad(loss(*leaves), leaves))
    whole = grad(loss, argnums=(0, 1, 2))
    found = [whole(*tensors) for tensors in each]
    by_vjp = [vjp(loss, *tensors)[1](torch.tensor(1.0)) for tensors in each]
    batched = list(zip(*vmap(whole)(*every), strict=True))
    for results in (found, by_vjp, batched):
        torch.testing.assert_close(results, wanted, check_stride=False)
    outputs = vmap(attention)(*every)
    torch.testing.assert_close(outputs[0][1], attention(*each[1]).out_BHTD)


def test_forward_mode_is_refused():
    """A custom op would drop the tangents: a derivative of 0."""
    tensors = inputs(1)
    for transform in (
        lambda: jvp(loss, tuple(tensors), tuple(tensors)),
        lambda: jacfwd(loss)(*tensors),
    ):
        with pytest.raises(NotImplementedError, match="jvp"):
            transform()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0], tensors[0])
        with pytest.raises(NotImplementedError, match="jvp"):
            attention(dual, *tensors[1:])
        with _Named(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention(dual, *tensors[1:])
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad(lambda *leaves: grad(loss)(*leaves).sum())(*tensors)


@pytest.mark.parametrize(
    "bad", [[0, 2.5, 7], [0.0, 7.0], ["0", "7"], torch.tensor([[0, 7]])], ids=str
)
def test_boundaries_are_integers(bad):
    with pytest.raises(ValueError, match="cu_seqlens must be integers, got"):
        attention(*inputs(1), cu_seqlens=bad)


def test_boundaries_may_be_a_tensor():
    tensors = inputs(1)
    found = attention(*tensors, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    for one, other in zip(found, attention(*tensors, cu_seqlens=(0, 3, 7)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_the_scale_is_positive(scale):
    """Flash kernels scale the hidden scores, too: minus infinity times 0 is NaN."""
    with pytest.raises(ValueError, match=f"scale {scale}: use a positive"):
        attention(*inputs(1), scale=scale)


@pytest.mark.parametrize(
    ("logit", "value", "named"),
    [
        ((1, 2, 1), None, "slot_logit_BHT"),
        ((1, 4, 5), None, "slot_logit_BHT"),
        ((4, 1), None, "slot_logit_BHT"),
        ((1, 4, 1), (1, 4, 1, 5), "slot_value_BHTD"),
        ((1, 4, 1), (1, 2, 1, 8), "slot_value_BHTD"),
        ((1, 4, 1), (8,), "slot_value_BHTD"),
    ],
)
def test_slots_that_do_not_broadcast(logit, value, named):
    """Triton's kernels would read beyond them."""
    slot = torch.zeros(logit), None if value is None else torch.zeros(value)
    with pytest.raises(ValueError, match=f"{named} must be .* or broadcast to it, got"):
        slot_attention(*inputs(1), *slot)


def test_a_slot_value_of_one_channel_is_one_for_every_channel():
    """Kernels get whole rows."""
    tensors = inputs(1)
    logit, value = torch.zeros(1, 4, 1), torch.ones(1, 4, 1, 1, requires_grad=True)
    out = slot_attention(*tensors, logit, value).out_BHTD
    wide = torch.ones(1, 4, 1, 8, requires_grad=True)
    expected = slot_attention(*tensors, logit, wide).out_BHTD
    assert torch.equal(out, expected)
    found, wanted = (
        torch.autograd.grad(o.sum(), v)[0] for o, v in ((out, value), (expected, wide))
    )
    torch.testing.assert_close(found, wanted.sum(-1, keepdim=True))


def test_a_sink_on_another_device_is_named():
    with pytest.raises(
        ValueError, match=r"sink_H must be \[4\] in torch.float32 on cpu, got .* on meta"
    ):
        attention(*inputs(1), variant="sink", sink_H=torch.zeros(4, device="meta"))
