"""What gate options come to, against the numbers of P1 Table 1 and Table 2."""

from types import SimpleNamespace

import pytest

from megasink.attention.variants import gate_options as gate_options
from megasink.training import ffn_width

# P1's MoE model: q 32, k 4, d_k 128; its 201 M for q * d_k * d over 24 layers gives d = 2048.
P1 = {
    "attention_variant": "gated",
    "gate_position": "sdpa",
    "gate_granularity": "headwise",
    "gate_shared_heads": False,
    "gate_operation": "multiply",
    "gate_activation": "sigmoid",
    "gate_input": "hidden",
    "sdpa_output_norm": "none",
    "switch_heads": "none",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
}
LAYERS = 24
ELEMENTWISE = {"gate_granularity": "elementwise"}


def options(**changes):
    return SimpleNamespace(**P1 | changes)


@pytest.mark.parametrize(
    ("changes", "millions"),
    [
        (ELEMENTWISE, 201),
        ({"gate_position": "value", **ELEMENTWISE}, 25),
        ({"gate_position": "key", **ELEMENTWISE}, 25),
        ({"gate_position": "query", **ELEMENTWISE}, 201),
        ({"gate_position": "output", **ELEMENTWISE}, 100),
        ({}, 1.6),
        ({"gate_position": "value"}, 0.2),  # n x k scores: Table 1 prints n x q (P1.5)
        ({"gate_shared_heads": True, **ELEMENTWISE}, 201),
        ({"gate_position": "value", "gate_shared_heads": True, **ELEMENTWISE}, 25),
        ({"gate_operation": "add", "gate_activation": "silu", **ELEMENTWISE}, 201),
        ({"gate_input": "none", **ELEMENTWISE}, 0.1),
        ({"attention_variant": "vanilla"}, 0),
        ({"attention_variant": "vanilla", "sdpa_output_norm": "rmsnorm"}, 0.1),
    ],
)
def test_parameters_are_those_of_table_1(changes, millions):
    found = LAYERS * ffn_width.parameters_per_layer(options(**changes)) / 1e6
    assert found == pytest.approx(millions, rel=0.03, abs=0.05)


@pytest.mark.parametrize(
    ("maps", "experts", "millions", "printed"),
    [
        ("key-value", 8, 353.9, 38),
        ("key-value", 4, 151.8, 13),
        ("value", 4, 76.3, 13),
        ("value", 8, 177.7, 25),
        ("value", 1, 0.2, 3),
    ],
)
def test_the_experts_of_table_6_are_more_than_it_prints(maps, experts, millions, printed):
    """Whole projections of each group; the value gate of row 6 has 0.2 million in Table 1."""
    switch = options(attention_variant="sink", switch_heads=maps, switch_experts=experts)
    found = LAYERS * ffn_width.parameters_per_layer(switch) / 1e6
    assert found == pytest.approx(millions, abs=0.05)
    assert round(found) != printed


def test_a_bias_is_counted():
    assert ffn_width.parameters_per_layer(options(), bias=True) == 32 * 2049


@pytest.mark.parametrize(
    ("changes", "counts", "megatrons", "rows"),
    [
        ({}, True, False, 32),
        (ELEMENTWISE, True, True, 0),
        ({"gate_activation": "ns-sigmoid", **ELEMENTWISE}, True, False, 4096),
        ({"gate_shared_heads": True, **ELEMENTWISE}, True, False, 4096),
        ({"gate_input": "none", **ELEMENTWISE}, True, False, 0),
        ({"gate_operation": "add", **ELEMENTWISE}, False, False, 4096),
        ({"gate_activation": "silu", **ELEMENTWISE}, False, False, 4096),
        ({"gate_position": "value"}, False, False, 4),
        ({"gate_position": "key", **ELEMENTWISE}, False, False, 512),
        ({"gate_position": "query"}, False, False, 32),
        ({"gate_position": "output", **ELEMENTWISE}, False, False, 0),
        ({"attention_variant": "sink"}, False, False, 0),
    ],
)
def test_where_scores_come_from_and_whether_they_count(changes, counts, megatrons, rows):
    found = options(**changes)
    assert gate_options.counts_heads(found) is counts
    assert gate_options.is_megatrons_output_gate(found) is megatrons
    assert gate_options.trailing_rows(found) == rows


def test_the_ffn_of_table_2_is_683_narrower():
    dense = options(num_attention_heads=16, num_query_groups=8, **ELEMENTWISE)
    extra = ffn_width.parameters_per_layer(dense)
    assert extra == 4_194_304
    found = ffn_width.matched_ffn_width(6144, extra, 2048, gated_linear_unit=True)
    assert found.exact == pytest.approx(6144 - 682.67, abs=0.01)
    assert found.after == 5504
    assert found.left_over == extra - (6144 - 5504) * 3 * 2048 == 262_144
    assert round(found.exact) == 6144 - 683
    for number in ("4,194,304", "5504", "6144", "5461.3", "+262,144", "128"):
        assert number in str(found)


@pytest.mark.parametrize("glu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_left_over_is_the_difference_of_the_models(glu, bias):
    def ffn(width: int, hidden: int = 512) -> int:
        first = (2 if glu else 1) * width
        return first * hidden + width * hidden + (first + hidden if bias else 0)

    found = ffn_width.matched_ffn_width(2048, 300_000, 512, gated_linear_unit=glu, bias=bias)
    assert found.left_over == 300_000 + ffn(found.after) - ffn(2048)
    assert abs(found.left_over) <= 64 * (ffn(1) - ffn(0))
    assert found.after % 128 == 0


def test_a_gate_larger_than_the_ffn_is_refused():
    with pytest.raises(ValueError, match="fewer than 128 columns would remain"):
        ffn_width.matched_ffn_width(1024, 3_000_000, 1024, gated_linear_unit=True)
