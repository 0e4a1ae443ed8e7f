"""Monte Carlo of P4's derivations: it finds the closed forms, and would find wrong ones."""

import numpy as np
import pytest
import torch

from examples.replicate import cone

DRAWS = 300


def test_the_closed_forms_hold():
    found = cone.checks(DRAWS)
    assert len(found) == len(cone.ALPHAS) * (1 + 2 * len(cone.LENGTHS)) + len(cone.SCALES)
    assert [check.what for check in found if not check.holds] == []
    assert all(check.high > check.low for check in found)


@pytest.mark.parametrize("wrong", [lambda alpha, q: alpha + (1 - alpha) * q, lambda alpha, q: q])
def test_a_wrong_closed_form_is_found(wrong, monkeypatch):
    monkeypatch.setattr(cone, "cone_norm", wrong)
    missed = [c for c in cone.checks(DRAWS) if "norm(c)²" in c.what and c.holds]
    assert len(missed) <= 6  # alpha 0.2 against 0: few draws cannot tell all


def test_values_lie_on_the_cone():
    value_NLE = cone.cone(np.random.default_rng(1), 0.3, 50, 4, 16)
    np.testing.assert_allclose((value_NLE**2).sum(-1), 1)
    np.testing.assert_allclose(value_NLE[..., 0], 0.3)
    assert abs(np.mean(value_NLE[..., 1:])) < 0.02


def test_the_jacobian_is_that_of_autograd():
    x_E = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    found = torch.autograd.functional.jacobian(cone.rms_norm, x_E)
    torch.testing.assert_close(cone.rms_jacobian(x_E), found)
    # A step along x changes nothing, one across x is divided by r (Eq. 5).
    torch.testing.assert_close(found @ x_E, torch.zeros_like(x_E))
    across = torch.zeros_like(x_E)
    across[0], across[1] = x_E[1], -x_E[0]
    torch.testing.assert_close(found @ across, across / x_E.square().mean().sqrt())


def test_the_fit_finds_the_cone_that_made_the_norms():
    square_sum_P = 1 / np.arange(1, 33)
    norm_P = 1.7 * np.sqrt(cone.cone_norm(0.4, square_sum_P))
    found = cone.fit(square_sum_P, norm_P)
    assert (found.alpha, found.scale, found.r2) == pytest.approx((0.4, 1.7, 1.0))
    assert found.tau == pytest.approx(1)
    assert found.first_over_later == pytest.approx(norm_P[0] / norm_P[1:].mean())
    rising = cone.fit(square_sum_P, norm_P[::-1])
    assert rising.tau == pytest.approx(-1)
    assert np.isnan(rising.alpha)  # the slope is negative
    with pytest.raises(ValueError, match="2 positions"):
        cone.fit(square_sum_P[:2], norm_P[:2])
