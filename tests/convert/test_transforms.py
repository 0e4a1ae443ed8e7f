"""What round trips of models do not show of transforms: exactness, padding, what is refused.

That each is the right one, by the logits of every target (tests/convert/test_round_trip.py).
"""

import pytest
import torch

from megasink.convert.transforms import Constant, PaddedRows, RepeatedGateQKV, Shifted
from megasink.errors import UserError


def test_a_gate_whose_rows_differ_in_a_head_is_not_headwise():
    transform = RepeatedGateQKV(groups=2, queries=2, head_dim=2)
    query_gate, *others = transform.to_hf(torch.randn(16, 3), torch.randn(4, 3))
    query_gate[2] += 1  # one element's gate of head 0
    with pytest.raises(UserError, match="elementwise"):
        transform.to_megatron(query_gate, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", [-1, 1])
def test_shifted_norms_are_exact_where_they_say(by, dtype):
    weight = (torch.linspace(0.5, 2, 97) - int(by == 1)).to(dtype)
    (converted,) = Shifted(by).to_hf(weight)
    assert converted.dtype is dtype
    (back,) = Shifted(by).to_megatron(converted)
    if by == -1:  # from a weight around 1 to one around 0
        assert torch.equal(back, weight)
    else:  # within one unit of the last place of the larger number
        assert float((back - weight).abs().max()) <= 2 * torch.finfo(dtype).eps


def test_padded_rows_come_back_as_zeros():
    (back,) = PaddedRows(3, 4).to_megatron(torch.ones(3, 2))
    assert back[:3].all()
    assert not back[3].any()


def test_a_constant_must_be_one_to_be_read():
    constant = Constant((2, 3), "bfloat16")
    (converted,) = constant.to_hf()
    assert constant.to_megatron(converted) == ()
    with pytest.raises(UserError, match="not zero"):
        constant.to_megatron(converted + 1)
