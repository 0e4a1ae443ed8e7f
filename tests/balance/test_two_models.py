"""Statistics are a model's own: models that train in one process do not change one another's."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.balance.two_models_tasks"
NAMES = ["sink", "gated", "vanilla"]


@pytest.fixture(scope="module")
def together(pool):
    return pool.run(f"{TASKS}:interleaved", SINGLE, names=NAMES)[0]


@pytest.mark.parametrize("name", NAMES)
def test_models_that_take_turns_are_as_each_alone(pool, together, name):
    (alone,) = pool.run(f"{TASKS}:interleaved", SINGLE, names=[name])
    found, wanted = dict(leaves(together[name])), dict(leaves(alone[name]))
    assert found.keys() == wanted.keys()
    different = [key for key in wanted if not np.array_equal(found[key], wanted[key], True)]
    assert different == []


def test_what_is_compared_is_there(together):
    for name, heads in (("sink", 4), ("gated", 8), ("vanilla", 2)):
        report = together[name]
        importance_LH = report["steps"][-1][-4]
        assert importance_LH.shape[-1] == heads
        assert 0 < importance_LH.min() < importance_LH.max() < 1
        assert len(report["steps"][0]) == (8 if name != "vanilla" else 4)  # four series
        assert max(np.abs(g).max() for g in report["gradients"][1].values()) > 1e-3
        coefficients = [v for k, v in report["state"].items() if k.endswith("coefficients")]
        assert all(np.abs(value).max() > 0 for value in coefficients)
        assert ("rates" in report) == (name != "gated")  # which counts none


def leaves(value, path=""):
    """(path, array) of everything in nested dictionaries and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, np.asarray(value)


def test_copies_of_a_config_share_and_new_ones_do_not(pool):
    (found,) = pool.run(f"{TASKS}:copies", SINGLE)
    assert found == {
        "copy": True,
        "deep copy": True,
        "its loss scale": True,
        "replaced": False,
        "loss scale of the replaced": True,
        "pickled": (2, 4, None),
        "fields": [],
    }


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (SINGLE, {"attention_variant": "gated"}),  # whose attention holds a copy of the config
        (Layout(tp=2, sp=True), {"num_query_groups": 1}),  # whose core attention does
        (Layout(pp=2, vpp=2), {"num_layers": 4}),
    ],
    ids=str,
)
def test_every_layer_of_a_model_shares_them(pool, layout, options):
    options = options | {"sequence_parallel": layout.sp}
    assert all(pool.run(f"{TASKS}:layers_of_one_model", layout, **options))


def test_two_models_of_one_config_are_refused(pool):
    (found,) = pool.run(f"{TASKS}:one_config_for_two", SINGLE)
    assert found.startswith("two modules record statistics as layer ")
