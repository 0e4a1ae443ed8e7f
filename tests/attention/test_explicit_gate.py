"""Explicit gates and norms of heads against their definitions: outputs and all gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from megasink.attention import (
    apply_gate,
    gate_values,
    head_rms_norm,
    mean_over_heads,
    reference_gate,
    reference_head_norm,
)
from megasink.attention.reference import GATE_ACTIVATIONS, GATE_OPERATIONS
from tests.attention.attention_oracle import assert_at_most_twice_plain_error

TOKENS, HEADS, HEAD_DIM = (3, 37), 4, 16  # an odd length; leading dimensions are tokens


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values that `dtype` holds exactly, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()


def fast_gate(x, score, activation, operation, shared_heads):
    """The calls that the layers make."""
    gate = gate_values(score, activation)
    if shared_heads:
        gate = mean_over_heads(gate, score.shape[-2])
    out = apply_gate(x, gate, operation)
    return out, gate.expand(*x.shape[:-1], score.shape[-1])


def results(function, tensors, gradients, dtype) -> dict[str, Tensor]:
    """Outputs and gradients of the inputs by name, computed in `dtype`, as float64."""
    inputs = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    outputs = function(*inputs.values())
    arriving = [g.to(o.dtype) for o, g in zip(outputs, gradients, strict=True)]
    grads = torch.autograd.grad(outputs, list(inputs.values()), arriving)
    named = {f"output {i}": o.detach().double() for i, o in enumerate(outputs)}
    return named | {f"d {n}": g.double() for n, g in zip(inputs, grads, strict=True)}


def compare(fast, reference, tensors, gradients, dtype) -> None:
    ours, plain = (results(f, tensors, gradients, dtype) for f in (fast, reference))
    exact = results(reference, tensors, gradients, torch.float64)
    # In float64 the plain formula is the yardstick itself: only the order of sums may differ.
    roundings = 8 if dtype is torch.float64 else 1
    assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=roundings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("activation", "operation", "shared", "width", "projected"),
    [
        *itertools.product(GATE_ACTIVATIONS, GATE_OPERATIONS, [False, True], [1, HEAD_DIM], [True]),
        ("sigmoid", "multiply", False, HEAD_DIM, False),
        ("sigmoid", "multiply", True, 1, False),
    ],
)
def test_a_gate_is_its_definition(dtype, activation, operation, shared, width, projected):
    tokens = TOKENS if projected else (1, 1)  # without an input a score is for every token
    tensors = {
        "x": normal(*TOKENS, HEADS, HEAD_DIM, seed=1, dtype=dtype),
        # Gates from 1e-5 to 1, different from head to head.
        "score": 4 * normal(*tokens, HEADS, width, seed=2, dtype=dtype),
    }
    gradients = [
        normal(*TOKENS, HEADS, HEAD_DIM, seed=3, dtype=dtype),
        normal(*TOKENS, HEADS, width, seed=4, dtype=torch.float32),  # as the balance loss gives
    ]
    options = {"activation": activation, "operation": operation, "shared_heads": shared}
    compare(
        lambda *t: fast_gate(*t, **options),
        lambda *t: reference_gate(*t, **options),
        tensors,
        gradients,
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_the_norm_of_a_head_is_its_definition(dtype, size):
    weight_HD = normal(HEADS, HEAD_DIM, seed=2, dtype=dtype)
    tensors = {
        "x": (size * normal(*TOKENS, HEADS, HEAD_DIM, seed=1, dtype=dtype)).to(dtype).double(),
        "weight": weight_HD,
    }
    gradients = [normal(*TOKENS, HEADS, HEAD_DIM, seed=3, dtype=dtype)]
    compare(
        lambda x, w: [head_rms_norm(x, w, 1e-5)],
        lambda x, w: [reference_head_norm(x, w)],
        tensors,
        gradients,
        dtype,
    )


def test_the_definitions_are_those_of_the_paper():
    x, score = torch.tensor([[[3.0], [5.0]]]), torch.tensor([[[0.0], [2.0]]])
    sigmoid = 1 / (1 + torch.exp(-score))
    for activation, gate in (
        ("sigmoid", sigmoid),
        ("silu", score * sigmoid),
        ("ns-sigmoid", (1 + sigmoid) / 2),
        ("identity", score),
    ):
        out, found = reference_gate(x, score, activation=activation)
        torch.testing.assert_close(found, gate)
        torch.testing.assert_close(out, x * gate)
        out, _ = reference_gate(x, score, activation=activation, operation="add")
        torch.testing.assert_close(out, x + gate)
    # The mean of the activated scores (P1.9), not the activation of the mean.
    out, gate = reference_gate(x, score, shared_heads=True)
    torch.testing.assert_close(gate, sigmoid.mean().expand(1, 2, 1))
    torch.testing.assert_close(out, x * sigmoid.mean())
    torch.testing.assert_close(
        reference_head_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0])),
        torch.tensor([3.0, 8.0]) / (12.5 + 1e-5) ** 0.5,
    )
    torch.testing.assert_close(reference_head_norm(score, None), score * sigmoid)


def test_the_gate_of_low_precision_scores_is_float32():
    gate = gate_values(torch.full((1,), 7.0, dtype=torch.bfloat16), "sigmoid")
    assert gate.dtype is torch.float32
    assert 0.999 < gate.item() < 1  # in bf16 it would be 1
    assert gate_values(torch.zeros(1, dtype=torch.float64), "silu").dtype is torch.float64


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'tanh'"):
        gate_values(torch.zeros(1), "tanh")
    with pytest.raises(ValueError, match="'divide'"):
        apply_gate(torch.zeros(1), torch.zeros(1), "divide")
