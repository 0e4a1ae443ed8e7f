"""Positions and packed documents inside core attention. Training: tests/distributed/test_masks."""

import math

import numpy as np
import pytest

from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.megatron.position_tasks"
TP = Layout(tp=2)


@pytest.fixture(scope="module")
def formulas(pool):
    return pool.run(f"{TASKS}:formulas", SINGLE)[0]


def test_slopes_of_alibi(formulas):
    slopes = formulas["slopes"]
    assert slopes[1] == [2.0**-8]
    assert slopes[8] == [2.0**-h for h in range(1, 9)]
    assert slopes[6] == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert slopes[12][8:] == [2.0 ** -(h + 0.5) for h in range(4)]


def test_buckets_are_those_of_t5(formulas):
    for (count, distance), (ours, theirs) in formulas["buckets"].items():
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{count} {distance}")
        half = count // 2
        assert ours[:half].tolist() == list(range(half))
        assert (ours[distance:] == count - 1).all()


def test_sinusoids(formulas):
    table = formulas["sinusoids"]
    for position, k in ((0, 0), (1, 0), (1999, 5), (300, 31)):
        angle = position / 10000 ** (2 * k / 64)
        expected = [math.sin(angle), math.cos(angle)]
        np.testing.assert_allclose(table[position, 2 * k : 2 * k + 2], expected, atol=1e-6)
    # Rounded to bf16 after the sine, every position still has a row of its own.
    assert len(np.unique(formulas["sinusoids in bf16"], axis=0)) == 2000


@pytest.mark.parametrize("layout", [SINGLE, TP], ids=str)
def test_alibi_is_the_definition_with_the_slopes_of_the_global_heads(pool, layout):
    assert max(pool.run(f"{TASKS}:alibi_by_definition", layout)) < 2e-6


def test_biases_are_float32_in_a_bf16_model(pool):
    for rank, found in enumerate(pool.run(f"{TASKS}:biases", TP, tokens=5000)):
        for own in range(2):
            slope = 2.0 ** (-2 * (2 * rank + own + 1))
            np.testing.assert_array_equal(found["alibi"][own], -slope * np.arange(5000))
        assert found["bucket"].shape == (2, 5000)
        assert found["bucket"][0, [0, 15, 16, 127, 128, 4999]].tolist() == [0, 15, 16, 31, 31, 31]


def test_a_repeated_token_without_positions_is_seen_uniformly(pool):
    """P2.45: A = 1/t in every layer and head, whatever the weights."""
    (found,) = pool.run(f"{TASKS}:repeated_tokens", SINGLE, kind="none")
    expected = sum(1 - 1 / t for t in range(1, 33))
    np.testing.assert_allclose(found["sums"], np.full((2, 4), expected), rtol=1e-6)
    # And under ALiBi the first key has the share of a geometric series.
    (found,) = pool.run(f"{TASKS}:repeated_tokens", SINGLE, kind="alibi")
    for head in range(4):
        ratio = math.exp(-(2.0 ** (-2 * (head + 1))))
        first = [ratio ** (t - 1) / sum(ratio**d for d in range(t)) for t in range(1, 33)]
        np.testing.assert_allclose(found["sums"][:, head], 32 - sum(first), rtol=1e-6)


def test_padding_of_a_pack_counts_nothing_and_changes_nothing(pool):
    (found,) = pool.run(f"{TASKS}:padded_pack", SINGLE)
    dense, padded = found["dense"], found["padded"]
    assert dense["tokens"] == padded["tokens"] == 13
    for name in ("out", "sums", "grad"):
        np.testing.assert_allclose(padded[name], dense[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert dense["pads"] == (0, 5, 6, 13)
    assert padded["pads"] == (0, 8, 10, 17, 20)


def test_boundaries_are_read_once_for_all_layers(pool):
    (found,) = pool.run(f"{TASKS}:host_reads", SINGLE)
    assert found == {"from the data loader": 0, "from elsewhere": 1}


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_the_table_of_t5_is_sharded_by_heads(pool, bf16):
    for rank, fact in enumerate(pool.run(f"{TASKS}:t5_facts", TP, bf16=bf16)):
        assert fact["dtype"] == ("torch.bfloat16" if bf16 else "torch.float32")
        assert fact["moved"] > 1e-4
        assert fact["partition"] == (True, 1)
        table = "self_attention.core_attention.relative_bias.weight"
        assert fact["keys"] == [f"decoder.layers.{layer}.{table}" for layer in (0, 2)]
        assert fact["global_shapes"] == [(32, 4)]
        assert fact["heads"] == [2 * rank]


def test_packs_that_are_refused(pool):
    (found,) = pool.run(f"{TASKS}:refused_packs", SINGLE)
    assert "format 'bshd': use thd" in found["format"]
    assert "boundaries" in found["decode"]
