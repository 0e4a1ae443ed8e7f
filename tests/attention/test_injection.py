"""The rows that carry the gradient of the LSE into a kernel: dO' . O' = dO . O - g."""

import pytest
import torch

from megasink.attention.injection import inject_lse_gradient

EXPONENTS = torch.arange(-30, 9, dtype=torch.float64)


def _inject(dtype, grad_out, out, lse_grad):
    """dO', O', the delta that they give and the one that is wanted, all in float64."""
    statistics = torch.promote_types(dtype, torch.float32)
    grad_out, out, lse_grad = grad_out.to(dtype), out.to(dtype), lse_grad.to(statistics)
    new_grad_out, new_out = inject_lse_gradient(grad_out, out, lse_grad)
    assert new_grad_out.dtype is new_out.dtype is dtype
    wanted = (grad_out.double() * out.double()).sum(-1) - lse_grad.double()
    given = (new_grad_out.double() * new_out.double()).sum(-1)
    return new_grad_out.double(), new_out.double(), given, wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", [1, 2, 64])
def test_gradients_of_every_size(dtype, head_dim):
    """g and dO from 1e-30 to 1e8, in every combination; dO 0, all over or where g is carried."""
    sizes = 10.0**EXPONENTS
    grad_out = torch.randn(4, len(sizes), len(sizes), head_dim, dtype=torch.float64)
    grad_out *= sizes[:, None, None]
    grad_out[1] = 0.0
    grad_out[2, ..., 0] = 0.0
    grad_out[3, ..., 0] *= 1e-12
    out = torch.randn_like(grad_out)
    lse_grad = torch.randn(grad_out.shape[:3], dtype=torch.float64) * sizes
    new_grad_out, new_out, given, wanted = _inject(dtype, grad_out, out, lse_grad)
    # Rounding g, and rounding the channels that change once more. A bfloat16 row with one channel
    # has no second one to take what rounding lost.
    eps = {torch.float64: 2**-45, torch.float32: 2**-22, torch.bfloat16: 2**-8}[dtype]
    of_g = eps if dtype is not torch.bfloat16 or head_dim == 1 else 2**-14
    largest_product = (grad_out * out).abs().amax(-1)
    allowed = of_g * lse_grad.abs() + eps * largest_product + 2.0**-118
    assert ((given - wanted).abs() <= allowed).all()
    # dO moves by less than a rounding of g, and nothing overflows on the way.
    moved = (new_grad_out - grad_out.to(dtype).double()).abs().amax(-1)
    assert (moved <= 2.0**-58 * lse_grad.abs() + 2.0**-119).all()
    assert torch.isfinite(new_out).all()


def test_nothing_is_replaced_where_nothing_need_be():
    """A row without g stays as it is, zeros included; dO is copied only where a row changes."""
    grad_out, out = torch.randn(2, 1, 2, 5, 8)
    lse_grad = torch.randn(1, 2, 5)
    grad_out[0, 0, 2], lse_grad[0, 0, 2] = 0.0, 0.0
    new_grad_out, new_out = inject_lse_gradient(grad_out, out, lse_grad)
    assert new_grad_out is grad_out
    assert torch.equal(new_out[0, 0, 2], out[0, 0, 2])
    assert torch.equal(new_out[..., 1:], out[..., 1:])
    lse_grad[0, 0, 2] = 1e-9
    before = grad_out.clone()
    new_grad_out, _ = inject_lse_gradient(grad_out, out, lse_grad)
    assert torch.equal(grad_out, before)
    assert (new_grad_out != grad_out).sum() == 1
