"""What core attention records and refuses. Its gradients: tests/distributed/test_oracle.py."""

import pytest

from tests.distributed.layout import SINGLE

TASKS = "tests.megatron.layer_tasks"


def test_only_forward_passes_that_train_are_recorded(pool):
    """Not evaluation, and not the first of the two forward passes of recompute."""
    (found,) = pool.run(f"{TASKS}:recorded", SINGLE)
    assert found == {"evaluation": 0, "no gradients": 0, "training": 1}


def test_what_is_not_supported_is_refused(pool):
    (found,) = pool.run(f"{TASKS}:refusals", SINGLE)
    assert found.pop("good") == ""
    words = {
        "cross": "attention_type 'cross'",
        "mask": "the mask AttnMaskType.padding",
        "packed": "packed sequences",
        "bias": "attention bias",
    }
    assert found.keys() == words.keys()
    for name, word in words.items():
        assert word in found[name], name


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("variant", ["vanilla", "sink", "off-by-one"])
def test_megatrons_own_attention_gives_the_same(pool, variant, window):
    """Its softmax_type vanilla, learnable and off-by-one, from the same offsets."""
    (errors,) = pool.run(f"{TASKS}:beside_upstream", SINGLE, variant=variant, window=window)
    assert len(errors) == (5 if variant == "sink" else 4)
    assert max(errors.values()) < 1e-5, errors


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize(
    ("options", "kept", "copied"),
    [
        ({}, 0, True),
        ({"attention_variant": "vanilla", "head_balance_coeff": 0.0}, 0, True),
        ({"attention_variant": "gated"}, 0, True),
        ({"attention_variant": "gated", "gate_granularity": "elementwise"}, 0, True),
        # What else keeps it; a copy of V would only be more.
        ({"qk_layernorm": True}, 1, False),
        ({"position_embedding_type": "learned_absolute"}, 1, False),
        (RECOMPUTE, 1, False),
    ],
    ids=["sink", "vanilla", "headwise", "elementwise", "norms", "no-rotation", "recompute"],
)
def test_backward_does_not_keep_the_projection(pool, options, kept, copied):
    (found,) = pool.run(f"{TASKS}:kept_projections", SINGLE, **options)
    layers = found["layers"]
    assert found == {"layers": layers, "kept": kept * layers, "copies": copied * layers}
