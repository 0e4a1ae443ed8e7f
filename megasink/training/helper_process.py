"""What runs in the helper processes of asynchronous checkpoints.

A helper that outlives its rank holds its memory, and might still write into the folder of a resumed
run. So it ends with the rank from its beginning on: this module imports nothing that takes long.
"""

import multiprocessing
import os
import signal
from typing import Any

from megasink.training.parent import ends_with
from megasink.training.stop import SIGNALS


def live_with_rank() -> None:
    """End with the rank, and ignore signals, which torchrun and Slurm send to helpers, too."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    if not ends_with(rank.pid or 0):
        os._exit(1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def write(*args: Any) -> None:
    """Run the writer process, with the arguments of PersistentAsyncCaller's loop."""
    live_with_rank()
    from megasink.training.checkpoint_writer import write_checkpoints

    write_checkpoints(*args)
