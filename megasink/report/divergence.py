"""Whether a run diverges: its smoothed loss rises far above its lowest value (P1.23)."""

import math

# Before so many steps nothing is called divergence: an average of a few jumps with each of them.
FACTOR, STEPS = 0.98, 50


class MovingAverage:
    """TensorBoard's exponential moving average, debiased, value by value.

    Attributes:
        count: values so far.
    """

    def __init__(self, factor: float) -> None:
        self._factor, self._sum, self.count = factor, 0.0, 0

    def __call__(self, value: float) -> float:
        """Add a value; the average."""
        self._sum = self._factor * self._sum + (1 - self._factor) * value
        self.count += 1
        return self._sum / (1 - self._factor**self.count)


class Divergence:
    """Follows the training loss of a run.

    The loss is smoothed by `MovingAverage` with the factor `FACTOR`, so that it follows about 50
    steps: a spike of 4 nats over 5 steps lifts it by 0.4, a loss that stays 4 nats higher by 2.5
    after 50 steps.

    Attributes:
        smoothed: nats per token; NaN before the first step.
        lowest: the lowest smoothed loss so far, and `lowest_step` when it was.
    """

    def __init__(self) -> None:
        self.smoothed = math.nan
        self.lowest, self.lowest_step = math.inf, 0
        self._average = MovingAverage(FACTOR)

    def add(self, step: int, loss: float) -> None:
        """The loss of a step, in nats per token."""
        self.smoothed = self._average(loss)
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_step = self.smoothed, step

    def exceeds(self, nats: float) -> bool:
        """Whether the smoothed loss is so far above its lowest, or is no number."""
        # "not below" and not "above": a loss that is no number has diverged.
        return self._average.count >= STEPS and not self.smoothed <= self.lowest + nats
