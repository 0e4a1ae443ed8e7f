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
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import SyncManager
from typing import Any

from megasink import platform
from megasink.train.guard import end, guard
from megasink.train.stop import SIGNALS
from megasink.upstream.training import CHECKPOINT_WRITER, PRELOADED_TENSORS, RESULTS_QUEUE

_SECONDS = 1.0  # how often a rank looks for its writer


def live_with_rank() -> None:
    """Called first in a helper: end it when its rank has ended, and not by a signal before.

    A helper that outlived its rank might still write into the folder of a resumed run. What to do
    about a signal is for the rank to decide: it may have a checkpoint to save.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

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

    preload = with_own_memory(FileSystemWriterAsync.preload_tensors)
    PRELOADED_TENSORS.apply(preload_tensors=staticmethod(preload))
    PersistentAsyncCaller.async_loop(*args)


def with_own_memory(preload: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's copying of a checkpoint to the host, for tensors that lie there already, too.

    Upstream's leaves those where they are, and the writer saves memory that training changes
    meanwhile. The rank waits for this function.
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
    with ExitStack() as stack:
        results: Any = queue.Queue()
        if args.async_save:
            results = stack.enter_context(_started_manager(args)).Queue()
            stack.enter_context(_started_writer(args))
        stack.enter_context(RESULTS_QUEUE.replacing(_results_queue=results))
        yield


@contextmanager
def _without_signals() -> Iterator[None]:
    """A process that is started now hears of no signal before `live_with_rank` ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _started_manager(args: Namespace) -> Iterator[SyncManager]:
    # Forked, as upstream's: it needs nothing but what is there.
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    with _without_signals():
        manager.start(live_with_rank)
    process = manager._process  # type: ignore[attr-defined]
    try:
        with _watched(lambda: process, f"the helper of rank {args.rank}'s checkpoint writer", args):
            yield manager
    finally:
        manager.shutdown()


@contextmanager
def _started_writer(args: Namespace) -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    upstream = PersistentAsyncCaller.schedule_async_call

    def schedule(self: Any, *call: Any) -> None:
        # The rank waits until the writer has copied its tensors. A writer that has ended after
        # the last step is started once more for the checkpoint after it.
        with guard.bounded("handing a checkpoint to its writer"), _without_signals():
            upstream(self, *call)

    with CHECKPOINT_WRITER.replacing(async_loop=staticmethod(write), schedule_async_call=schedule):
        try:
            # initialize_megatron finds it and starts none: a server that forks writers on demand
            # (upstream's "forkserver") would die of a SIGTERM, and the writer's exit code with it.
            with _without_signals():
                PersistentAsyncCaller._get_process(
                    args.rank, "spawn", args.async_ckpt_cpu_priority, args.async_ckpt_io_priority
                )
            name = f"the checkpoint writer of rank {args.rank}"
            with _watched(lambda: PersistentAsyncCaller._persistent_process, name, args):
                yield
        finally:
            if writer := PersistentAsyncCaller._persistent_process:  # training ended in an error
                _abort(writer)


def _abort(writer: Any) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncCallsQueue,
        PersistentAsyncCaller,
    )

    caller = AsyncCallsQueue._persistent_caller or PersistentAsyncCaller()
    queues = (caller._persistent_queue, caller._persistent_preload_q)
    caller.process = writer
    caller.close(abort=True)
    AsyncCallsQueue._persistent_caller = None
    for queue_to_writer in queues:
        # Python would wait at its end until somebody has read what is in the queue.
        queue_to_writer.cancel_join_thread()


@contextmanager
def _watched(helper: Callable[[], Any], name: str, args: Namespace) -> Iterator[None]:
    """End this rank when its helper has died or is stopped: upstream would wait for ever.

    Args:
        helper: the process that is there now, or None once it was asked to end.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            process = helper()
            if process is None:
                ended.wait(_SECONDS)
            elif multiprocessing.connection.wait([process.sentinel], _SECONDS):
                ended.wait(_SECONDS)  # one that was asked to end is forgotten at once
                if helper() is process and not ended.is_set():
                    end(
                        f"{name} (process {process.pid}) ended, and with it the checkpoint that "
                        "it was writing: was it killed for lack of memory? Those before it in "
                        f"{args.save} are whole"
                    )

    with guard.helping(lambda: getattr(helper(), "pid", None), name):
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
