"""Rounding: at most twice the error of the plain computation in that precision.

Shapes: B rows, H query heads, G key/value groups, T tokens, D head dim.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward as without_sinks

from megasink.transformers import megasink_attention, megasink_mask
from tests.transformers.oracle import oracle_attention

B, H, G, D = 2, 4, 2, 16


class Layer(nn.Module):
    """What attention functions read from an attention layer."""

    def __init__(self, sinks: Tensor | None):
        super().__init__()
        self.sinks, self.num_key_value_groups, self.is_causal = sinks, H // G, True


def tensors(tokens: int, sink: float | None, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, gradient of the output, and sinks, rounded to the precision."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(B, H, tokens, D), (B, G, tokens, D), (B, G, tokens, D), (B, tokens, H, D)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if sink is not None:
        made.append(torch.linspace(-sink, sink, H).to(dtype))
    return made


def results(function, given, mask, window) -> list[Tensor]:
    """Output, and gradients of query, key, value and sinks."""
    query, key, value, grad_out, *sinks = (t.clone() for t in given)
    inputs = [query, key, value, *sinks]
    for tensor in inputs:
        tensor.requires_grad_()
    layer = Layer(sinks[0] if sinks else None)
    sink = {"s_aux": sinks[0]} if sinks else {}
    out, _ = function(
        layer, query, key, value, mask, scaling=D**-0.5, sliding_window=window, **sink
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sink", [None, 1.0, 20.0, 90.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_eager(dtype, sink, window):
    for tokens, before in ((37, 0), (65, 9), (1, 0), (2, 1)):
        given = tensors(tokens, sink, dtype)
        real = torch.ones(B, tokens, dtype=torch.bool)
        real[1, :before] = False
        visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if window is not None:
            visible = visible.triu(1 - window)
        visible = visible & real[:, None, None]
        given[3] = given[3] * real[..., None, None]  # what padding returns is not defined
        exact_mask = torch.zeros(visible.shape, dtype=torch.float64)
        exact_mask.masked_fill_(~visible, torch.finfo(torch.float64).min)
        exact = results(oracle_attention, [t.double() for t in given], exact_mask, window)
        plain_mask = torch.zeros(visible.shape, dtype=dtype)
        plain_mask.masked_fill_(~visible, torch.finfo(dtype).min)
        eager = without_sinks if sink is None else eager_attention_forward
        plain = results(eager, given, plain_mask, window)
        ours_mask = megasink_mask(
            B, tokens, tokens, local_size=window, attention_mask=real if before else None
        )
        ours = results(megasink_attention, given, ours_mask, window)
        for found, rounded, wanted in zip(ours, plain, exact, strict=True):
            assert found.dtype is dtype
            if found.shape[:2] == (B, tokens):  # the output
                found, rounded, wanted = (t[real] for t in (found, rounded, wanted))
            mistake, allowed = error(found, wanted), error(rounded, wanted)
            # The backward computes the weights again from the LSE, in float32 (z - LSE has the
            # rounding of an LSE as large as the sink), and returns them rounded once.
            floor = torch.finfo(dtype).eps + (sink or 0.0) * torch.finfo(torch.float32).eps
            assert mistake <= 2 * allowed + floor, (tokens, mistake, allowed)
            if tokens < 3:
                break  # the gradients of one or two tokens cancel, but for a few roundings


def test_sinks_in_bfloat16_have_the_gradient_of_float32_ones():
    """Rounded once at the end, not at each of 600 tokens."""
    given = tensors(300, 2.0, torch.bfloat16)
    mask = megasink_mask(B, 300, 300)
    *_, rounded = results(megasink_attention, given, mask, None)
    wide = [t.float() for t in given]
    *_, exact = results(megasink_attention, wide, mask, None)
    # The output of a bfloat16 kernel is rounded; its sum with 600 random signs is not worse.
    torch.testing.assert_close(
        rounded.float(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max())
    )


def test_autocast_computes_in_its_precision():
    given = tensors(37, 1.0, torch.float32)
    mask = megasink_mask(B, 37, 37)
    with torch.autocast("cpu", torch.bfloat16):
        layer = Layer(given[4])
        out, _ = megasink_attention(
            layer, given[0], given[1], given[2].bfloat16(), mask, s_aux=given[4]
        )
    assert out.dtype is torch.bfloat16
    narrow = [t.bfloat16() for t in given[:3]]
    expected, _ = megasink_attention(layer, *narrow, mask, s_aux=given[4])
    assert torch.equal(out, expected)


def test_values_may_be_narrower_than_keys():
    """As in multi-head latent attention."""
    query, key, value, _, sinks = tensors(19, 1.0, torch.float64)
    layer, narrow = Layer(sinks), value[..., :5]
    mask = megasink_mask(B, 19, 19)
    out, _ = megasink_attention(layer, query, key, narrow, mask, s_aux=sinks)
    whole, _ = megasink_attention(layer, query, key, value, mask, s_aux=sinks)
    torch.testing.assert_close(out, whole[..., :5], rtol=0, atol=0)
