"""Initial weights. That they do not depend on the layout: tests/distributed/test_layouts.py."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE

TASKS = "tests.megatron.layer_tasks"
QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def weights(pool):
    def build(seed: int, **options):
        return pool.run(f"{TASKS}:initial_weights", SINGLE, init_seed=seed, **options)[0]

    return build


def test_the_seed_decides(weights):
    first, again, other = weights(1), weights(1), weights(2)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
        constant = np.ptp(first[name]) == 0
        assert constant == np.array_equal(first[name], other[name]), name


def test_layers_differ(weights):
    found = weights(1)
    assert not np.array_equal(found[QKV.format(0)], found[QKV.format(1)])


def test_standard_deviations_are_megatrons(weights):
    found = weights(1, init_method_std=0.1)
    for name, array in found.items():
        if array.ndim > 1:
            # Megatron divides that of the layers that write into the residual by sqrt(2 L).
            scaled = "linear_proj" in name or "linear_fc2" in name
            assert array.std() == pytest.approx(0.1 / 2 if scaled else 0.1, rel=0.05), name
    assert all(np.all(a == 1) for n, a in found.items() if "layernorm" in n)


def test_outputs_may_start_at_zero(weights):
    found = weights(1, zero_init_outputs=True)
    zero = {name.split(".")[-2] for name, array in found.items() if not array.any()}
    # Sinks start at 0 too.
    assert zero == {"linear_proj", "linear_fc2", "output_layer", "core_attention"}


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_sinks_start_at_their_option(weights, value):
    found = weights(1, softmax_offset_init=value)
    sinks = [array for name, array in found.items() if name.endswith("softmax_offset")]
    assert len(sinks) == 2
    assert all(np.all(sink == value) for sink in sinks)


@pytest.mark.parametrize(
    ("shared", "shapes"), [(False, [(4, 16)] * 4), (True, [(16,)] * 4)], ids=["heads", "shared"]
)
def test_biases_start_with_the_standard_deviation_of_the_paper(weights, shared, shapes):
    options = {"attention_variant": "kv-bias", "bias_shared_heads": shared}
    found = weights(1, **options)
    biases = {n: a for n, a in found.items() if n.endswith(("key_bias", "value_bias"))}
    assert [a.shape for a in biases.values()] == shapes
    values = np.concatenate([a.ravel() for a in biases.values()])
    # Not --init-method-std, which is 0.2 here. 64 numbers give it to a quarter.
    assert values.std() == pytest.approx(0.02, rel=0.1 if values.size > 200 else 0.3)
    assert len(set(values)) == len(values)  # every layer, head and kind has its own
    again = weights(1, **options)
    for name, array in biases.items():
        np.testing.assert_array_equal(again[name], array)


@pytest.mark.parametrize("variant", ["vanilla", "off-by-one"])
def test_other_variants_have_no_sinks(weights, variant):
    found = weights(1, attention_variant=variant)
    assert not [name for name in found if "softmax_offset" in name]
    assert found.keys() < weights(1).keys()


def test_a_weight_of_unknown_initialisation_is_refused(pool):
    (message,) = pool.run(f"{TASKS}:unknown_weight", SINGLE)
    assert "decoder.layers.0.extra.weight" in message
