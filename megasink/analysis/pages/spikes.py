"""Detect loss spikes: steps whose loss stands out from the preceding steps (P1.23)."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

WINDOW, DEVIATIONS, RISE = 50, 5.0, 0.1


class SpikeCounter:
    """Count the spikes of a loss, step by step.

    The papers count spikes by eye. The rule here: a step spikes if its loss exceeds the mean of the
    preceding `WINDOW` steps (at least ten) by more than `DEVIATIONS` of their standard deviations
    and by more than `RISE` nats. Steps of a spike are not part of later windows, and consecutive
    ones are one spike. A NaN or infinite loss is a spike.

    Attributes:
        count: number of spikes so far.
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
            spikes = bool(loss - recent.mean() > max(DEVIATIONS * recent.std(), RISE))
        starts = spikes and not self._inside
        self.count += starts
        if not spikes:
            self._calm.append(float(loss))
        self._inside = spikes
        return starts


def loss_spikes(loss: NDArray[np.float64]) -> list[int]:
    """Find the spikes of a loss, by the rule of `SpikeCounter`.

    Args:
        loss: [steps] nats per token.

    Returns:
        index of the first step of each spike.
    """
    counter = SpikeCounter()
    return [index for index, value in enumerate(loss) if counter(value)]
