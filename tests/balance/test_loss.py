"""Head imbalance, the balance loss and its gradient, as pure functions (P0 Eq. 6-7)."""

import pytest
import torch

from megasink.balance.loss import (
    head_balance_gradient,
    head_balance_loss,
    layer_imbalance,
    routed_heads,
    squared_cv,
)


@pytest.fixture
def importance_LH():
    """Three layers of five heads, float64, from nearly closed to nearly open."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(3, 5, generator=generator, dtype=torch.float64) * 0.98 + 0.01


def test_the_standard_deviation_is_that_of_the_population():
    importance_LH = torch.tensor([[1.0, 3.0], [2.0, 2.0]])  # means 2, variances 1 and 0
    assert squared_cv(importance_LH).tolist() == [0.25, 0.0]
    assert layer_imbalance(importance_LH).mean().item() == 0.25  # mean of CV 0.5 and 0


def test_the_loss_sums_over_layers_and_multiplies_by_the_heads():
    importance_LH = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    assert head_balance_loss(importance_LH, 0.5).item() == 0.5 * 2 * (0.25 + 0.25)


def test_gradient_equals_autograd_of_the_loss(importance_LH):
    leaf = importance_LH.clone().requires_grad_()
    head_balance_loss(leaf, 0.3).backward()
    gradient = head_balance_gradient(importance_LH, 0.3)
    assert gradient.abs().min() > 0
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-13)


def test_gradient_in_float32_of_small_importances():
    """Gates of sink heads: the squares and cubes of the mean must not underflow."""
    importance_H = torch.tensor([1e-9, 3e-9, 2e-10])
    exact = head_balance_gradient(importance_H.double(), 1.0)
    assert exact.isfinite().all()
    torch.testing.assert_close(
        head_balance_gradient(importance_H, 1.0).double(), exact, rtol=1e-5, atol=0.0
    )


def test_gradient_descent_evens_the_heads_out(importance_LH):
    step = 1e-4 * head_balance_gradient(importance_LH, 1.0)
    assert (squared_cv(importance_LH - step) < squared_cv(importance_LH)).all()


def test_the_loss_does_not_see_a_common_factor(importance_LH):
    """So by Euler's theorem sum_h dL/dImp_h * Imp_h is 0: the log must show the loss itself."""
    torch.testing.assert_close(
        head_balance_loss(importance_LH, 1.0), head_balance_loss(0.01 * importance_LH, 1.0)
    )
    gradient = head_balance_gradient(importance_LH, 1.0)
    products = (gradient * importance_LH).sum(-1)
    assert products.abs().max() < 1e-12
    assert (gradient * importance_LH).abs().sum() > 0.1


def test_closed_heads_have_no_loss_and_no_gradient():
    """A layer whose heads are all closed: 0 / 0 nowhere, also by autograd, also beside others."""
    importance_LH = torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.4, 0.6]], requires_grad=True)
    loss = head_balance_loss(importance_LH, 1.0)
    loss.backward()
    gradient = head_balance_gradient(importance_LH.detach(), 1.0)
    assert squared_cv(importance_LH)[0] == 0
    assert loss.item() == pytest.approx(3 * (0.08 / 3) / 0.16)
    for found in (gradient, importance_LH.grad):
        assert found[0].tolist() == [0.0, 0.0, 0.0]
        assert found[1].abs().min() > 0


def test_one_closed_head_among_open_ones_is_opened():
    gradient = head_balance_gradient(torch.tensor([0.0, 0.9, 0.9]), 1.0)
    assert gradient[0] < 0 < gradient[1]


def test_shared_heads_are_left_out_of_the_loss(importance_LH):
    """Eq. 8: the loss of the routed heads alone, with their number as the factor."""
    routed = routed_heads(importance_LH, 2)
    assert routed.sum(-1).tolist() == [3, 3, 3]
    leaf = importance_LH.clone().requires_grad_()
    loss = head_balance_loss(leaf, 0.3, routed)
    alone = torch.stack([row[mask] for row, mask in zip(importance_LH, routed, strict=True)])
    torch.testing.assert_close(loss, head_balance_loss(alone, 0.3))
    loss.backward()
    gradient = head_balance_gradient(importance_LH, 0.3, routed)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-13)
    assert (gradient == 0).equal(~routed)


def test_the_most_important_heads_are_shared_and_ties_go_by_index():
    importance_LH = torch.tensor([[0.2, 0.9, 0.5, 0.9], [0.5, 0.5, 0.5, 0.5]])
    assert routed_heads(importance_LH, 1).tolist() == [
        [True, False, True, True],
        [False, True, True, True],
    ]
    assert routed_heads(importance_LH, 2)[1].tolist() == [False, False, True, True]


def test_no_loss_and_no_gradient_before_the_shared_heads_are_known(importance_LH):
    none = torch.zeros_like(importance_LH, dtype=torch.bool)
    assert head_balance_loss(importance_LH, 1.0, none) == 0
    assert not head_balance_gradient(importance_LH, 1.0, none).any()
