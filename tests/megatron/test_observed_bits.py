"""Logging changes no bit: observed steps are those that are not, whatever `--log-interval`."""

import itertools

import pytest

from megasink.attention.variants import variants
from tests.distributed.layout import SINGLE
from tests.distributed.pool import Pool

SOFTMAX = [{"attention_variant": v.name} for v in variants() if not v.explicit_gate]
GATED = [
    {
        "attention_variant": "gated",
        "gate_granularity": granularity,
        "gate_position": position,
        "gate_input": source,
    }
    for granularity, position, source in itertools.product(
        ("headwise", "elementwise"),
        ("sdpa", "value", "key", "query", "output"),
        ("hidden", "none"),
    )
    if position != "output" or granularity == "elementwise"
]
SHARED = [
    {"attention_variant": "gated", "gate_granularity": granularity, "gate_shared_heads": True}
    for granularity in ("headwise", "elementwise")
]


@pytest.fixture(scope="module")
def interpreting():
    """A worker in which Triton interprets its kernels."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with Pool(1, fresh=True) as worker:
            yield worker


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.later)])
@pytest.mark.parametrize("gates", ["triton", "torch"])
def test_observed_steps_are_the_others_to_the_bit(interpreting, gates, every):
    models = [*SOFTMAX, *GATED, *SHARED][::every]
    task = "tests.megatron.observed_bits:differences"
    assert interpreting.run(task, SINGLE, gates=gates, models=models) == [[]]
