"""When a run counts as diverged."""

import math

import numpy as np

from megasink.figures.loss_spikes import FACTOR, STEPS, Divergence
from megasink.figures.run_figure import smoothed


def follow(losses):
    """First step at which the loss is 1 nat above its lowest; None for never."""
    divergence = Divergence()
    for step, loss in enumerate(losses, 1):
        divergence.add(step, loss)
        if divergence.exceeds(1.0):
            return step
    return None


def falling(steps):
    generator = np.random.default_rng(0)
    return 3 + 7 / np.sqrt(np.arange(1, steps + 1)) + 0.1 * generator.standard_normal(steps)


def test_a_falling_loss_has_not_diverged():
    assert follow(falling(2000)) is None


def test_spikes_are_no_divergence():
    losses = falling(2000)
    for start in (100, 500, 900):
        losses[start : start + 5] += 4.0
    assert follow(losses) is None


def test_a_loss_that_stays_high_is_one():
    losses = falling(2000)
    losses[1000:] += 4.0
    assert 1000 < follow(losses) < 1030


def test_a_loss_that_never_fell_is_judged_after_fifty_steps():
    losses = np.concatenate([[10.8], np.full(100, 13.0)])
    assert follow(losses) == STEPS


def test_what_is_no_number_has_diverged():
    losses = falling(200)
    losses[150] = math.nan
    assert follow(losses) == 151
    losses[150] = math.inf
    assert follow(losses) == 151


def test_the_lowest_value_and_its_step_are_kept():
    losses = falling(300)
    losses[200:] = 9.0
    divergence = Divergence()
    for step, loss in enumerate(losses, 1):
        divergence.add(step, loss)
    average = smoothed(losses, FACTOR)
    assert divergence.lowest_step == average.argmin() + 1 == 200
    assert math.isclose(divergence.lowest, average.min(), rel_tol=1e-12)
    assert math.isclose(divergence.smoothed, average[-1], rel_tol=1e-12)


def test_a_run_without_a_step_has_not_diverged():
    assert not Divergence().exceeds(1.0)
