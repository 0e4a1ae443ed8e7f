"""--stop-on-divergence: end the run on every rank at the same step."""

import math
from pathlib import Path

import torch

from megasink.checkpoints.intact import iterations
from megasink.errors import UserError
from megasink.figures.losses import Divergence
from megasink.training.stop import DIVERGES


def stop_if_diverged(
    divergence: Divergence, nats: float, iteration: int, folder: str | None
) -> None:
    """End the run on all ranks if the rank that has the loss detects divergence.

    Performs one all-reduce of four numbers after step `iteration`. Call on every rank. `divergence`
    tracks the loss on the rank that has it, and is empty elsewhere.
    """
    here = [-math.inf] * 4
    if divergence.exceeds(nats):
        # A maximum over ranks may drop a NaN.
        smoothed = divergence.smoothed if math.isfinite(divergence.smoothed) else math.inf
        here = [1.0, smoothed, divergence.lowest, float(divergence.lowest_step)]
    numbers = torch.tensor(here, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    diverged, smoothed, lowest, lowest_step = numbers.tolist()
    if diverged < 0:
        return
    above = smoothed - lowest
    how = f"{smoothed:.3f} nats, {above:.3f} above" if math.isfinite(above) else "NaN or Inf, after"
    raise UserError(
        f"step {iteration}: {DIVERGES} (--stop-on-divergence {nats:g}): smoothed "
        f"over 50 steps it is {how} its lowest value {lowest:.3f} at step {lowest_step:.0f}. "
        f"{_advice(folder, int(lowest_step))}"
    )


def _advice(folder: str | None, step: int) -> str:
    before = [i for i in iterations(Path(folder)) if i <= step] if folder else []
    if not before:
        return "No checkpoint is from before that step: start again with a lower --lr"
    return (
        f"The newest checkpoint before that step is {before[-1]}: start a new run from it with "
        f"--load {folder} --ckpt-step {before[-1]} --override-opt-param-scheduler and a lower --lr"
    )
