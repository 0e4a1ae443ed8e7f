"""Gates and their sums, against the definition."""

import pytest
import torch

from megasink.attention import attention, first_key_gate, reference_attention


@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gate_of_vanilla_attention_from_its_lse(window, dtype):
    query_BHTD = torch.randn(2, 4, 13, 8, dtype=torch.float64).mul(3).to(dtype)
    key_BGSD, value_BGSD = torch.randn(2, 2, 2, 13, 8, dtype=torch.float64).mul(3).to(dtype)
    tensors = (query_BHTD, key_BGSD, value_BGSD)
    wide = [tensor.double() for tensor in tensors]
    expected = reference_attention(*wide, window=window, scale=0.5).gate_BHT
    lse_BHT = attention(*tensors, window=window, scale=0.5, with_gate=False).lse_BHT
    gate_BHT = first_key_gate(query_BHTD, key_BGSD, lse_BHT, scale=0.5, window=window)
    assert gate_BHT.dtype is lse_BHT.dtype
    # The LSE of a bf16 kernel is good to about 1e-4. Otherwise the logit and the LSE, of tens, have
    # a few roundings of their size, and the gate is an exponential of their difference.
    tolerance = 4 * torch.finfo(lse_BHT.dtype).eps * float(lse_BHT.abs().max())
    tolerance = 2e-3 if dtype is torch.bfloat16 else tolerance
    torch.testing.assert_close(gate_BHT.double(), expected, rtol=0, atol=tolerance)
    assert bool((gate_BHT[..., 0] == 0).all())
    assert expected.min() < 0.05
    assert expected.max() > 0.95
