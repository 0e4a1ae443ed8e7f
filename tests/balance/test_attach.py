"""The gradient that the balance loss adds to the backward pass of the language model's loss."""

import pytest
import torch

from megasink.balance.layer_loss import attach_gradient
from megasink.balance.step import Factors

COEFFICIENTS_H = torch.tensor([0.5, -2.0, 1.0])


@pytest.fixture
def scale():
    """Of a model for which Megatron has set no loss scale yet."""
    return Factors()


@pytest.fixture
def importance_H():
    return torch.tensor([0.1, 0.2, 0.3], requires_grad=True)


def test_the_output_and_its_gradient_pass_unchanged(importance_H):
    output = torch.randn(4, 2, 6, requires_grad=True)
    attached = attach_gradient(output, importance_H, lambda: COEFFICIENTS_H)
    assert torch.equal(attached, output)
    weight = torch.randn(4, 2, 6)
    (attached * weight).sum().backward()
    assert torch.equal(output.grad, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_importance_gets_the_coefficients_in_float32(importance_H, dtype):
    output = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    attach_gradient(output, importance_H, lambda: COEFFICIENTS_H).sum().backward()
    assert importance_H.grad.dtype == torch.float32
    assert torch.equal(importance_H.grad, COEFFICIENTS_H)


def test_coefficient_and_loss_scale_multiply(scale):
    scale.set_loss_scale(torch.tensor([8.0]))  # Megatron hands over one element
    assert torch.equal(scale.scaled(COEFFICIENTS_H, 3.0), 24.0 * COEFFICIENTS_H)
    scale.set_loss_scale(0.25)
    assert torch.equal(scale.scaled(COEFFICIENTS_H, 3.0), 0.75 * COEFFICIENTS_H)


def test_the_loss_scale_is_that_at_backward(importance_H, scale):
    """Megatron sets the scale of a microbatch after its forward pass."""
    output = torch.zeros(2, requires_grad=True)
    scale.set_loss_scale(torch.tensor([100.0]))
    attached = attach_gradient(output, importance_H, lambda: scale.scaled(COEFFICIENTS_H, 1.0))
    scale.set_loss_scale(torch.tensor([0.25]))
    attached.sum().backward()
    assert torch.equal(importance_H.grad, 0.25 * COEFFICIENTS_H)


def test_the_gradient_does_not_depend_on_the_loss_behind_it(importance_H):
    """The balance loss is a term of its own, not a factor of the language model's."""
    output = torch.zeros(2, requires_grad=True)
    attached = attach_gradient(output, importance_H, lambda: COEFFICIENTS_H)
    (1000.0 * attached.sum()).backward()
    assert torch.equal(importance_H.grad, COEFFICIENTS_H)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_coefficient_counts(scale, share):
    scale.begin(share)
    assert torch.equal(scale.scaled(COEFFICIENTS_H, 1.0), share * COEFFICIENTS_H)


def test_the_targets_are_those_of_the_microbatch_whose_backward_pass_runs(scale):
    """Under 1F1B the forward passes of others lie between, and recompute asks in the backward."""
    seen, outputs = [], []
    for targets in (3.0, 5.0):
        scale.set_targets(torch.tensor(targets))
        leaf = torch.zeros(2, requires_grad=True)
        leaf.register_hook(lambda _: seen.append(float(scale.targets)))
        outputs.append(scale.keep(2.0 * leaf))
    for output in outputs:
        output.sum().backward()
    assert seen == [3.0, 5.0]


def test_the_factors_of_the_host_and_of_the_schedule_multiply(scale):
    """A loop that multiplies its loss says so; the schedule must not overwrite it."""
    scale.set_loss_scale(3.0)
    scale.set_loss_scale(torch.tensor([0.25]), by_schedule=True)
    assert torch.equal(scale.scaled(COEFFICIENTS_H, 1.0), 0.75 * COEFFICIENTS_H)


def test_targets_that_nobody_gave_are_refused(scale):
    output = torch.zeros(2, requires_grad=True)
    assert scale.keep(output) is output
    with pytest.raises(RuntimeError, match=r"call config\.statistics\.set_targets"):
        scale.targets  # noqa: B018  # a property
