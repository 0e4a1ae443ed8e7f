"""Each transform against weights written out by hand, and both ways.

On meta tensors and on biases, by tests/convert/test_round_trip.py.
"""

import pytest
import torch

from megasink.convert.transforms import (
    Constant,
    GatedGroupedQKV,
    GateUp,
    GroupedQKV,
    InterleavedGateUp,
    PaddedRows,
    RepeatedGateQKV,
    Shifted,
    Transposed,
)
from megasink.errors import UserError

HIDDEN = 3
# Two groups of two query heads of head dim 2; the gate rows of heads come after their queries.
GROUPS, QUERIES, DIM = 2, 2, 2


def rows(*names):
    """[rows, HIDDEN]: a row for each name, with a number of its own."""
    numbers = {name: float(i + 1) for i, name in enumerate(sorted(set(names)))}
    return torch.tensor([[numbers[n] * 10 + c for c in range(HIDDEN)] for n in names])


def named(*heads):
    """The rows of heads: D names for each."""
    return [f"{head}.{d}" for head in heads for d in range(DIM)]


PLAIN = named("q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1")
PARTS = (named("q0", "q1", "q2", "q3"), named("k0", "k1"), named("v0", "v1"))
GATED = named("q0", "q1", "g0", "g1", "k0", "v0", "q2", "q3", "g2", "g3", "k1", "v1")
GATED_QUERIES = named("q0", "g0", "q1", "g1", "q2", "g2", "q3", "g3")


def by_name(names, table):
    """Rows for names, numbered as in `table`."""
    by_row = dict(zip(table, rows(*table), strict=True))
    return torch.stack([by_row[name] for name in names])


def test_groups_of_queries_keys_and_values():
    transform = GroupedQKV(GROUPS, QUERIES, DIM)
    converted = transform.to_hf(rows(*PLAIN))
    for tensor, names in zip(converted, PARTS, strict=True):
        assert torch.equal(tensor, by_name(names, PLAIN))
    assert torch.equal(transform.to_megatron(*converted)[0], rows(*PLAIN))


def test_an_elementwise_gate_goes_beside_its_query_head():
    transform = GatedGroupedQKV(GROUPS, QUERIES, DIM)
    converted = transform.to_hf(rows(*GATED))
    for tensor, names in zip(converted, (GATED_QUERIES, *PARTS[1:]), strict=True):
        assert torch.equal(tensor, by_name(names, GATED))
    assert torch.equal(transform.to_megatron(*converted)[0], rows(*GATED))


def test_an_elementwise_gate_has_a_projection_of_its_own():
    transform = GroupedQKV(GROUPS, QUERIES, DIM, gate=True)
    converted = transform.to_hf(rows(*GATED))
    gates = named("g0", "g1", "g2", "g3")
    for tensor, names in zip(converted, (PARTS[0], gates, *PARTS[1:]), strict=True):
        assert torch.equal(tensor, by_name(names, GATED))
    assert torch.equal(transform.to_megatron(*converted)[0], rows(*GATED))
    bias = rows(*GATED)[:, 0]
    assert torch.equal(transform.to_megatron(*transform.to_hf(bias))[0], bias)


def test_a_headwise_gate_is_repeated_for_every_element():
    transform = RepeatedGateQKV(GROUPS, QUERIES, DIM)
    gate = -rows("g0", "g1", "g2", "g3")
    query_gate, key, value = transform.to_hf(rows(*PLAIN), gate)
    by_head = query_gate.view(4, 2, DIM, HIDDEN)
    assert torch.equal(by_head[:, 0].flatten(0, 1), by_name(PARTS[0], PLAIN))
    for d in range(DIM):
        assert torch.equal(by_head[:, 1, d], gate)
    mixed, back = transform.to_megatron(query_gate, key, value)
    assert torch.equal(mixed, rows(*PLAIN))
    assert torch.equal(back, gate)
    query_gate[DIM] += 1  # one element's gate of head 0
    with pytest.raises(UserError, match="elementwise"):
        transform.to_megatron(query_gate, key, value)


def test_the_gates_rows_are_the_first_of_the_ffn():
    gate, up = GateUp().to_hf(rows("a", "b", "c", "d"))
    assert torch.equal(torch.cat([gate, up]), rows("a", "b", "c", "d"))
    assert len(gate) == 2
    assert torch.equal(GateUp().to_megatron(gate, up)[0], rows("a", "b", "c", "d"))


def test_gpt_oss_has_gate_and_up_in_turn():
    weight = torch.arange(2 * 4 * HIDDEN).view(2, 4, HIDDEN).float()
    (converted,) = InterleavedGateUp().to_hf(weight)
    assert converted.shape == (2, HIDDEN, 4)
    assert torch.equal(converted[..., 0::2], weight[:, :2].transpose(1, 2))
    assert torch.equal(converted[..., 1::2], weight[:, 2:].transpose(1, 2))
    assert torch.equal(InterleavedGateUp().to_megatron(converted)[0], weight)
    assert torch.equal(Transposed().to_megatron(*Transposed().to_hf(weight))[0], weight)


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


def test_padded_rows_go_and_come_back_as_zeros():
    weight = rows("a", "b", "c", "pad")
    (converted,) = PaddedRows(3, 4).to_hf(weight)
    assert torch.equal(converted, weight[:3])
    (back,) = PaddedRows(3, 4).to_megatron(converted)
    assert torch.equal(back[:3], weight[:3])
    assert not back[3].any()


def test_a_constant_is_written_and_must_be_one_to_be_read():
    constant = Constant((2, 3), "bfloat16")
    (converted,) = constant.to_hf()
    assert converted.shape == (2, 3)
    assert converted.dtype is torch.bfloat16
    assert not converted.any()
    assert constant.to_megatron(converted) == ()
    with pytest.raises(UserError, match="not zero"):
        constant.to_megatron(converted + 1)
