"""The code of the helper processes of asynchronous checkpoints.

A helper that outlives its rank holds its memory, and might still write into the folder of a resumed
run. So it is tied to the rank from the start: this module imports nothing slow.
"""

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from megasink.training.die_with_parent import ends_with
from megasink.training.stop import SIGNALS


def live_with_rank() -> None:
    """End with the rank, and ignore signals, which torchrun and Slurm also send to helpers."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    if not ends_with(rank.pid or 0):
        os._exit(1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def write(*args: Any) -> None:
    """Write what the rank hands over, with the arguments of PersistentAsyncCaller's loop."""
    live_with_rank()
    from megasink import cpu

    if not cpu.cuda_present():
        cpu.activate()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from megasink.upstream.training_patches import PRELOADED_TENSORS

    preload = with_own_memory(FileSystemWriterAsync.preload_tensors)
    PRELOADED_TENSORS.apply(preload_tensors=staticmethod(preload))
    PersistentAsyncCaller.async_loop(*args)


def with_own_memory(preload: Callable[..., Any]) -> Callable[..., Any]:
    """Make upstream's copy of a checkpoint also copy tensors on the host, which it shares."""

    @functools.wraps(preload)
    def preload_tensors(*args: Any, **kwargs: Any) -> Any:
        return [
            (file, key, (data, [(item, t.clone() if t.is_shared() else t) for item, t in tensors]))
            for file, key, (data, tensors) in preload(*args, **kwargs)
        ]

    return preload_tensors
