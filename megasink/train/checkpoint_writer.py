"""The processes that write asynchronous checkpoints: they end with their rank, and it with them.

With --async-save Megatron hands a checkpoint to a process of its own, and hears from it through a
manager, which is another process. Upstream's outlive a rank that is killed (they hold its memory,
and may still write into the folder that a resumed run writes to), die of a SIGTERM that is meant
for the rank (torchrun and Slurm send it to everything that a rank has started), and when one of
them dies the rank waits for ever.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.managers import SyncManager
from typing import Any

from megasink import platform

_SECONDS = 1.0  # how often a rank looks for its writer


def live_with_rank() -> None:
    """Called first in a helper: end it when its rank has ended, and not by a signal before.

    A helper that outlived its rank might still write into the folder of a resumed run. What to do
    about a signal is for the rank to decide: it may have a checkpoint to save.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write(*args: Any) -> None:
    """The writer, in a process of its own; arguments as upstream's PersistentAsyncCaller's loop."""
    live_with_rank()
    if not platform.cuda_present():
        platform.activate()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    upstream = FileSystemWriterAsync.preload_tensors
    FileSystemWriterAsync.preload_tensors = staticmethod(with_own_memory(upstream))
    PersistentAsyncCaller.async_loop(*args)


def with_own_memory(preload: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's copying of a checkpoint to the host, for tensors that lie there already, too.

    filesystem_async.py:254 moves tensors to the CPU: where they are on it, it does nothing, and the
    writer saves memory that training changes meanwhile. The rank waits for this function.
    """

    @functools.wraps(preload)
    def preload_tensors(*args: Any, **kwargs: Any) -> Any:
        return [
            (file, key, (data, [(item, t.clone() if t.is_shared() else t) for item, t in tensors]))
            for file, key, (data, tensors) in preload(*args, **kwargs)
        ]

    return preload_tensors


@contextmanager
def checkpoint_helpers(args: Namespace) -> Iterator[None]:
    """Start what Megatron's checkpoints need, in its place; end it however training ends.

    Without --async-save there is no helper: upstream starts a manager even so, only to hand results
    from a function to its caller.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not args.async_save:
        filesystem_async._results_queue = queue.Queue()
        try:
            yield
        finally:
            filesystem_async._results_queue = None
        return
    with _started_manager() as manager, _started_writer(args):
        filesystem_async._results_queue = manager.Queue()
        try:
            yield
        finally:
            filesystem_async._results_queue = None


@contextmanager
def _started_manager() -> Iterator[SyncManager]:
    # Forked, as upstream's: it needs nothing but what is there.
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start(live_with_rank)
    try:
        yield manager
    finally:
        manager.shutdown()


@contextmanager
def _started_writer(args: Namespace) -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        PersistentAsyncCaller,
    )

    loop = PersistentAsyncCaller.async_loop
    PersistentAsyncCaller.async_loop = staticmethod(write)
    try:
        # initialize.py:74 finds it and starts none: a server that forks writers on demand
        # (upstream's "forkserver") would die of a SIGTERM, and the writer's exit code with it.
        writer = PersistentAsyncCaller._get_process(
            args.rank, "spawn", args.async_ckpt_cpu_priority, args.async_ckpt_io_priority
        )
    finally:
        PersistentAsyncCaller.async_loop = loop
    ended = threading.Event()
    threading.Thread(target=_end_with, args=(writer, ended, args), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if PersistentAsyncCaller._persistent_process is writer:  # training ended in an error
            caller = AsyncCallsQueue._persistent_caller or PersistentAsyncCaller()
            caller.process = writer
            caller.close(abort=True)
            AsyncCallsQueue._persistent_caller = None


def _end_with(writer: Any, ended: threading.Event, args: Namespace) -> None:
    """End this rank when its writer has died: upstream would wait for it for ever."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    while not ended.is_set():
        if not multiprocessing.connection.wait([writer.sentinel], _SECONDS):
            continue
        time.sleep(_SECONDS)  # a writer that was asked to end is forgotten at once
        if ended.is_set() or PersistentAsyncCaller._persistent_process is not writer:
            return
        print(
            f"megasink: error: the checkpoint writer of rank {args.rank} (process {writer.pid}) "
            "ended, and with it the checkpoint that it was writing: was it killed for lack of "
            f"memory? Those before it in {args.save} are whole: use --resume",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)
