"""Fewer queries than keys under a window: a chunk of a context-parallel rank (P2.19).

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import pytest
import torch

from megasink.attention import VARIANTS, attention, first_key_gate
from tests.attention.attention_oracle import check, make_case

pytestmark = pytest.mark.usefixtures("memory_of_nans")
# (queries, keys): a history shorter and longer than the windows, none, odd lengths.
SIZES = [(1, 23), (5, 8), (7, 20), (9, 29), (13, 14), (20, 20)]


@pytest.mark.parametrize("backend", ["flash-cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [2, 5, 7, 12])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_on_a_rectangle(variant, window, dtype, backend):
    for queries, keys in SIZES:
        sink = 5.0 if keys % 2 else -5.0
        case = make_case(tokens=queries, keys=keys, dtype=dtype, sink=sink)
        check(case, dtype, variant, backend=backend, window=window)


def test_a_window_of_one_token_is_its_value():
    case = make_case(tokens=5, keys=9)
    query, key, value = (t.float() for t in (case.query, case.key, case.value))
    out, _, gate = attention(query, key, value, window=1)
    expected = value[:, :, 4:].repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
    assert (gate == 1).all()  # key 0 is hidden


@pytest.mark.parametrize("window", [None, 3, 11, 40])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_the_gate_from_the_lse_alone(queries, keys, window):
    case = make_case(tokens=queries, keys=keys)
    query, key, value = (t.float() for t in (case.query, case.key, case.value))
    _, lse, gate = attention(query, key, value, window=window)
    torch.testing.assert_close(first_key_gate(query, key, lse, window=window), gate)
    bias = torch.linspace(2.0, -2.0, 4 * keys).view(4, keys)
    _, lse, gate = attention(query, key, value, window=window, distance_bias_HS=bias)
    found = first_key_gate(query, key, lse, window=window, distance_bias_HS=bias)
    torch.testing.assert_close(found, gate)
