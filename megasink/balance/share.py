"""The share of the coefficient of the head-balance loss that counts in a step."""


def share_of_step(
    step: int, warmup_steps: int = 0, decay_steps: int = 0, total_steps: int = 0
) -> float:
    """Return the share of the coefficient by a linear warmup and a linear decay, in [0, 1].

    Args:
        step: Number of completed steps.
        warmup_steps: Steps of the linear warmup; 0 for none.
        decay_steps: Steps of the linear decay, to 1 / decay_steps in the last step; 0 for none.
        total_steps: Steps of the run; used with a decay only.
    """
    rising = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (total_steps - step) / decay_steps if decay_steps else 1.0
    return max(0.0, min(1.0, rising, falling))
