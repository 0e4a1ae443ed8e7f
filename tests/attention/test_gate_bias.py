"""The gradient at a bias on the logit of the gate, against autograd through such a bias.

Shapes: S sequence, B batch, H query heads, G groups, D head dim.
"""

import pytest
import torch

from megasink.attention import (
    attention,
    gate_bias_gradient,
    gate_slope,
    gate_sum,
    reference_slot_attention,
)

B, H, G, S, D = 2, 4, 2, 13, 8


@pytest.fixture
def tensors():
    """Query, key, value [B, heads, S, D] and an output gradient; float64."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, S, D), (B, G, S, D), (B, G, S, D), (B, H, S, D)]
    return [3 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def compare(out_BHSD, gate_BHS, value_BHSD, grad_BHSD, biased, mask_SB=None):
    """The formulas on an output and gate against autograd of `biased`, bias -> (output, gate)."""
    bias_H = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    biased_out_BHSD, biased_gate_BHS = biased(bias_H)
    torch.testing.assert_close(biased_out_BHSD, out_BHSD)  # the bias is 0
    if mask_SB is not None:
        biased_gate_BHS = biased_gate_BHS * mask_SB.T[:, None]
    (output_H,) = torch.autograd.grad(
        (biased_out_BHSD * grad_BHSD).sum(), bias_H, retain_graph=True
    )
    (gate_H,) = torch.autograd.grad(biased_gate_BHS.sum(), bias_H)
    assert output_H.abs().min() > 1e-3
    assert gate_H.abs().min() > 1e-3
    gate_BHS1 = gate_BHS[..., None]
    found_H = gate_bias_gradient(grad_BHSD, out_BHSD, gate_BHS1, value_BHSD)
    torch.testing.assert_close(found_H, output_H)
    mask_BS = None if mask_SB is None else mask_SB.T
    torch.testing.assert_close(gate_sum(gate_slope(gate_BHS1), mask_BS), gate_H)


@pytest.mark.parametrize("slot_value", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_of_a_sink_it_is_minus_the_gradient_of_its_logit(tensors, slot_value, masked):
    *qkv, grad_BHSD = tensors
    sink_H = torch.tensor([5.0, -5.0, 2.0, -1.0], dtype=torch.float64)
    value_HD = None
    if slot_value:
        value_HD = torch.linspace(-2, 2, H * D, dtype=torch.float64).view(H, D)
    mask_SB = torch.arange(S)[:, None].expand(S, B) < torch.tensor([S, 9]) if masked else None

    def biased(bias_H):
        value_1H1D = None if value_HD is None else value_HD[None, :, None]
        out, _, gate = reference_slot_attention(*qkv, (sink_H - bias_H)[None, :, None], value_1H1D)
        return out, gate

    out_BHSD, gate_BHS = biased(torch.zeros(H, dtype=torch.float64))
    value_BHSD = None if value_HD is None else value_HD[None, :, None]
    compare(out_BHSD, gate_BHS, value_BHSD, grad_BHSD, biased, mask_SB)


def test_of_vanilla_attention_it_is_that_of_the_first_keys_score(tensors):
    query, key, value, grad_BHSD = tensors

    def biased(bias_H):
        scores = query @ key.repeat_interleave(H // G, 1).transpose(-1, -2) * D**-0.5
        first = torch.zeros(S, S, dtype=torch.float64)
        first[:, 0] = 1.0
        scores = scores - bias_H[None, :, None, None] * first
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return weights @ value.repeat_interleave(H // G, 1), 1 - weights[..., 0]

    out_BHSD, _, gate_BHS = attention(query, key, value, backend="eager")
    first_value = value[:, :, :1].repeat_interleave(H // G, 1)
    compare(out_BHSD, gate_BHS, first_value, grad_BHSD, biased)


@pytest.mark.parametrize("width", [1, D])
def test_of_an_explicit_gate_it_is_that_of_its_score(tensors, width):
    x_BHSD, _, _, grad_BHSD = tensors
    generator = torch.Generator().manual_seed(2)
    score = 2 * torch.randn(B, H, S, width, generator=generator, dtype=torch.float64)
    bias_H = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    gate = (score + bias_H[:, None, None]).sigmoid()
    (output_H,) = torch.autograd.grad((x_BHSD * gate * grad_BHSD).sum(), bias_H, retain_graph=True)
    (gate_H,) = torch.autograd.grad(gate.mean(-1).sum(), bias_H)
    gate = gate.detach()
    found_H = gate_bias_gradient(grad_BHSD, x_BHSD * gate, gate)
    torch.testing.assert_close(found_H, output_H)
    torch.testing.assert_close(gate_slope(gate).sum((0, 2)), gate_H)


def test_low_precision_is_summed_in_float32():
    out = torch.full((1, 1, 3000, 1), 1.0, dtype=torch.bfloat16)
    gate = torch.full((1, 1, 3000, 1), 0.5)
    found = gate_bias_gradient(torch.full_like(out, 1.0), out, gate)
    assert found.dtype == torch.float32
    assert found.item() == 1500.0
