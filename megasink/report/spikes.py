"""Loss spikes: steps whose loss stands out from the steps before them (P1.23)."""

import numpy as np
from numpy.typing import NDArray

WINDOW, DEVIATIONS, RISE = 50, 5.0, 0.1


def loss_spikes(loss: NDArray[np.float64]) -> list[int]:
    """Where a loss spikes.

    The papers count spikes by eye; the rule here: a step spikes when its loss exceeds the mean of
    the `WINDOW` steps before it (of at least ten) by more than `DEVIATIONS` of their standard
    deviations and by more than `RISE` nats. Steps of a spike are not part of a later window, and
    consecutive ones are one spike. A loss that is no number spikes.

    Args:
        loss: [steps] nats per token.

    Returns:
        index of the first step of each spike.
    """
    found: list[int] = []
    calm: list[float] = []
    inside = False
    for index, value in enumerate(loss):
        spikes = not np.isfinite(value)
        if len(calm) >= 10 and not spikes:
            recent = np.asarray(calm[-WINDOW:])
            spikes = value - recent.mean() > max(DEVIATIONS * recent.std(), RISE)
        if spikes and not inside:
            found.append(index)
        if not spikes:
            calm.append(float(value))
        inside = spikes
    return found
