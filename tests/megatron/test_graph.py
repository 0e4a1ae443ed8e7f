"""Why CUDA graphs are refused: what a replay would miss (docs/gpu.md)."""

import numpy as np
import pytest

from tests.distributed.layout import SINGLE


@pytest.fixture(scope="module", params=["sink", "vanilla"])
def steps(request, pool):
    (found,) = pool.run("tests.megatron.graph_tasks:steps", SINGLE, variant=request.param)
    return found


def test_the_first_step_divides_by_too_few_tokens(steps):
    """Three microbatches of four are counted, and the sums of all are divided by their tokens."""
    eager, replayed = steps[0]["eager"], steps[0]["replayed"]
    assert (eager["counted"], replayed["counted"]) == (4, 3)
    np.testing.assert_allclose(replayed["importance"], eager["importance"] * 4 / 3, rtol=1e-6)
    assert (replayed["importance"] > 1).all()  # no mean of gates is


def test_later_steps_have_no_importance(steps):
    """The replay adds to the table of the first step."""
    for step in steps[1:]:
        assert np.isfinite(step["eager"]["importance"]).all()
        assert step["replayed"]["counted"] == 0
        assert np.isnan(step["replayed"]["importance"]).all()


def test_the_balance_loss_stays_as_it_was_captured(steps):
    """In the first step there is none; a replay never has one."""
    for step in steps[1:]:
        plain, balanced = step["no balance loss"]["gradients"], step["eager"]["gradients"]
        differs = np.abs(balanced - plain).max()
        assert differs > 0
        assert np.abs(step["replayed"]["gradients"] - plain).max() <= differs / 10
