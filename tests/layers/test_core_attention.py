"""What core attention records and refuses. Its gradients: tests/distributed/test_oracle.py."""

import pytest

from tests.distributed.layout import SINGLE

TASKS = "tests.layers.tasks"


def test_only_forward_passes_that_train_are_recorded(pool):
    """Not evaluation, and not the first of the two forward passes of recompute."""
    (found,) = pool.run(f"{TASKS}:recorded", SINGLE)
    assert found == {"evaluation": 0, "no gradients": 0, "training": 1}


def test_what_is_not_supported_is_refused(pool):
    (found,) = pool.run(f"{TASKS}:refusals", SINGLE)
    assert found.pop("good") == ""
    words = {
        "cross": "self attention only",
        "mask": "causal mask only",
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
