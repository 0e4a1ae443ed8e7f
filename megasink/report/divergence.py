"""Whether a run diverges: its smoothed loss rises far above its lowest value (P1.23)."""

import math

# Before so many steps nothing is called divergence: an average of a few jumps with each of them.
FACTOR, STEPS = 0.98, 50


class Divergence:
    """Follows the training loss of a run.

    The loss is smoothed by an exponential moving average of factor `FACTOR`, debiased as
    TensorBoard's, so that it follows about 50 steps: a spike of 4 nats over 5 steps lifts it by
    0.4, a loss that stays 4 nats higher by 2.5 after 50 steps.

    Attributes:
        smoothed: nats per token; NaN before the first step.
        lowest: the lowest smoothed loss so far, and `lowest_step` when it was.
    """

    def __init__(self) -> None:
        self.smoothed = math.nan
        self.lowest, self.lowest_step = math.inf, 0
        self._sum, self._weight, self._count = 0.0, 0.0, 0

    def add(self, step: int, loss: float) -> None:
        """The loss of a step, in nats per token."""
        self._sum = FACTOR * self._sum + (1 - FACTOR) * loss
        self._weight = FACTOR * self._weight + (1 - FACTOR)
        self._count += 1
        self.smoothed = self._sum / self._weight
        if self.smoothed < self.lowest:
            self.lowest, self.lowest_step = self.smoothed, step

    def exceeds(self, nats: float) -> bool:
        """Whether the smoothed loss is so far above its lowest, or is no number."""
        # "not below" and not "above": a loss that is no number has diverged.
        return self._count >= STEPS and not self.smoothed <= self.lowest + nats
