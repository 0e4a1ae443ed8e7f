"""Task for the workers: a signal that one rank got."""

import os
import signal

import torch


def told_to_end() -> list[bool]:
    """Whether this rank knows that some rank was told to end, before and after rank 1 was."""
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    from megasink.compat import mend_signal_handler

    mend_signal_handler()
    with DistributedSignalHandler(signal.SIGUSR2) as handler:
        found = [any(handler.signals_received())]
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        found.append(any(handler.signals_received()))
    return found
