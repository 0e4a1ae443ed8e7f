"""Inference that passes by core attention runs what its kernels know, and nothing else."""

import pytest

from tests.distributed.layout import SINGLE

TASKS = "tests.megatron.decoding_tasks"


@pytest.mark.parametrize(
    "options",
    [
        {"attention_variant": "vanilla"},
        {"attention_variant": "sink", "softmax_offset_init": 2.0, "window_size": (3, 0)},
        {"attention_variant": "off-by-one", "head_balance_coeff": 0.0},
    ],
)
def test_models_that_dynamic_inference_computes(pool, options):
    assert pool.run(f"{TASKS}:dynamic_problems", SINGLE, device="cuda", **options) == [[]]


def test_any_other_option_is_refused_by_name(pool):
    """The tests of each mechanism cannot know those that come after it: one is planted here."""
    (found,) = pool.run(f"{TASKS}:dynamic_problems_of_an_unknown_option", SINGLE)
    assert found == [
        "dynamic inference supports vanilla, sink, off-by-one attention, "
        "not --attention-variant planted",
        "dynamic inference has not been tested with --planted-slope 0.5",
    ]


def test_forward_passes_are_refused(pool):
    (found,) = pool.run(f"{TASKS}:refusals", SINGLE)
    assert "needs a CUDA device" in found["dynamic"]
    assert "megasink generate" in found["dynamic"]
    assert "--flash-decode" in found["flash decode"]
    assert "--sequence-parallel" in found["sequence parallel"]
    assert "--context-parallel-size" in found["context parallel"]
    assert found["static"] == found["training"] == ""
