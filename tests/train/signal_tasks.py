"""Task for the workers: a signal that one rank got."""

import os
import signal

import torch


def told_to_end() -> list[tuple[bool, int]]:
    """Whether this rank knows that some rank was told to end, and by which signal: before and
    after upstream's handler on rank 1 was told, and after rank 0 was told otherwise."""
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    from megasink.train.phases import agreeing_on_signals

    own, agreed = [0], [0]
    found = []
    with agreeing_on_signals(lambda: own[0], lambda number: agreed.__setitem__(0, number)):
        with DistributedSignalHandler(signal.SIGUSR2) as handler:
            found.append((any(handler.signals_received()), agreed[0]))
            if torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            found.append((any(handler.signals_received()), agreed[0]))
        with DistributedSignalHandler(signal.SIGUSR2) as handler:
            if torch.distributed.get_rank() == 0:
                own[0] = signal.SIGTERM
            found.append((any(handler.signals_received()), agreed[0]))
    return found
