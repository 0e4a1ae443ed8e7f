"""Task for the workers: a signal that one rank got."""

import os
import signal

import torch


def told_to_end() -> list[tuple[bool, int]]:
    """What this rank knows at the end of each step: whether some rank was told to end, and by which
    signal. Upstream's handler is told on rank 1 before step 2; rank 0 otherwise before step 4,
    which waits."""
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    from megasink.training.rank_phases import agreeing_on_signals

    own, agreed, waits = [0], [0], [False]
    found = []

    def end_step(handler: DistributedSignalHandler) -> None:
        found.append((any(handler.signals_received()), agreed[0]))
        agreed[0] = 0

    seam = agreeing_on_signals(
        lambda: own[0], lambda number: agreed.__setitem__(0, number), lambda: waits[0]
    )
    with seam, DistributedSignalHandler(signal.SIGUSR2) as handler:
        end_step(handler)
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        end_step(handler)
        end_step(handler)
        if torch.distributed.get_rank() == 0:
            own[0] = signal.SIGTERM
        waits[0] = True
        end_step(handler)
    return found
