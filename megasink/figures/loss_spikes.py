"""Detect spikes in a loss curve, and divergence: a smoothed rise far above the minimum (P1.23)."""

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

WINDOW, DEVIATIONS, RISE = 50, 5.0, 0.1
_LATEST = 5

# No divergence before STEPS steps: an average of a few values jumps with each of them.
FACTOR, STEPS = 0.98, 50


class SpikeCounter:
    """Count the spikes of a loss, step by step.

    The papers count spikes by eye. The rule here: a step spikes if its loss exceeds the level of
    the preceding `WINDOW` steps (at least ten) by more than `DEVIATIONS` standard deviations and by
    more than `RISE` nats. The level is that of a line fitted to the window, so that a falling loss
    hides no spike, or the mean of the last five steps where that is higher, so that a loss that
    stops falling does not count. The deviation is taken from the changes between neighboring steps,
    which a trend leaves alone. Steps of a spike are not part of later windows, and consecutive ones
    are one spike. A NaN or infinite loss is a spike.
    """

    def __init__(self) -> None:
        self.count = 0
        self._calm: deque[float] = deque(maxlen=WINDOW)
        self._inside = False

    def __call__(self, loss: float) -> bool:
        """Add the loss of a step; return whether a spike starts here."""
        spikes = not np.isfinite(loss)
        if len(self._calm) >= 10 and not spikes:
            recent = np.asarray(self._calm)
            x = np.arange(len(recent)) - (len(recent) - 1) / 2
            slope = x @ recent / (x @ x)
            line = recent.mean() + slope * (x[-1] + 1)
            level = max(line, recent[-_LATEST:].mean())
            deviation = np.diff(recent).std() / math.sqrt(2)
            spikes = bool(loss - level > max(DEVIATIONS * deviation, RISE))
        starts = spikes and not self._inside
        self.count += starts
        if not spikes:
            self._calm.append(float(loss))
        self._inside = spikes
        return starts


def loss_spikes(loss: NDArray[np.float64]) -> list[int]:
    """Return the index of the first step of each spike of a loss, by the rule of `SpikeCounter`."""
    counter = SpikeCounter()
    return [index for index, value in enumerate(loss) if counter(value)]


class MovingAverage:
    """TensorBoard's debiased exponential moving average, value by value."""

    def __init__(self, factor: float) -> None:
        self._factor, self._sum, self.count = factor, 0.0, 0

    def __call__(self, value: float) -> float:
        """Add a value and return the average."""
        self._sum = self._factor * self._sum + (1 - self._factor) * value
        self.count += 1
        return self._sum / (1 - self._factor**self.count)


class Divergence:
    """Track the training loss of a run, smoothed by `MovingAverage` over about 50 steps."""

    def __init__(self) -> None:
        self.smoothed = math.nan  # nats per token; NaN before the first step
        self.lowest, self.lowest_step = math.inf, 0  # of the smoothed loss so far
        self._average = MovingAverage(FACTOR)

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a step, in nats per token."""
        self.smoothed = self._average(loss)
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_step = self.smoothed, step

    def exceeds(self, nats: float) -> bool:
        """Return whether the smoothed loss is `nats` above its minimum, or NaN."""
        # "not below" rather than "above": NaN counts as diverged.
        return self._average.count >= STEPS and not self.smoothed <= self.lowest + nats
