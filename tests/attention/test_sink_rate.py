"""Mean attention to the first key, from the LSE alone, against the S x S definition."""

import pytest
import torch

from megasink.attention import attention, first_key_share, reference_attention

B, H, G, S, D, TOKENS = 2, 4, 2, 47, 8, 33


def tensors(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, S, D), (B, G, S, D), (B, G, S, D)]
    query, key, value = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    key[:, :, 0] = 3 * query[:, ::2, :].mean(2)  # some heads attend to the first key
    return [(2 * x).to(dtype) for x in (query, key, value)]


def definition(query, key, **options):
    """P2.1 of the sequence cut to `TOKENS`: the weight of key 0 is the output where it alone has
    the value 1."""
    value = torch.zeros_like(key[:, :, :TOKENS])
    value[:, :, 0, 0] = 1.0
    cut = (query[:, :, :TOKENS], key[:, :, :TOKENS], value)
    return reference_attention(*cut, **options).out_BHTD[..., 0].mean(-1)


BIAS = torch.linspace(0, -4, S).expand(H, S) * torch.tensor([1.0, 0.5, 0.25, 0.1])[:, None]
SINK = torch.tensor([5.0, -5.0, 1.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variant": "sink", "sink_H": SINK},
        {"variant": "off-by-one"},
        {"window": 7},
        {"distance_bias_HS": BIAS},
        {"scale": 0.7},
    ],
    ids=["vanilla", "sink", "off-by-one", "window", "bias", "scale"],
)
def test_it_is_the_mean_weight_of_key_0(dtype, options):
    query, key, value = tensors(dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def as_dtype(kind):
        return {k: v.to(kind) if torch.is_tensor(v) else v for k, v in options.items()}

    lse = attention(query, key, value, **as_dtype(wide), backend="eager").lse_BHT
    kept = {k: v for k, v in as_dtype(wide).items() if k in ("window", "distance_bias_HS", "scale")}
    found = first_key_share(query, key, lse, TOKENS, **kept)
    exact = definition(query.double(), key.double(), **as_dtype(torch.float64))
    assert found.dtype == wide
    assert float(exact.std()) > 0.02  # heads differ
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)


def test_the_first_row_counts():
    """1 / T at least, even where nobody looks at the first key."""
    query, key, value = tensors(torch.float64)
    key[:, :, 0] = -100 * query.mean((1, 2), keepdim=True)[:, :, 0]
    lse = attention(query, key, value, backend="eager").lse_BHT
    assert (first_key_share(query, key, lse, TOKENS) >= 1 / TOKENS).all()
