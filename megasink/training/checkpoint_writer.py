"""Helper processes for asynchronous checkpoints: helpers and their rank end together.

With --async-save Megatron hands a checkpoint to a writer process, and gets results through a
manager, which is another process. Upstream's helpers outlive a rank that is killed (they hold its
memory, and may still write into the folder of a resumed run), die from a SIGTERM meant for the rank
(torchrun and Slurm send it to all children of a rank), and leave the rank waiting forever if one of
them dies.
"""

import multiprocessing
import multiprocessing.connection
import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import SyncManager
from typing import Any

from megasink.console.stopping import starting_processes
from megasink.training.guard import end, guard
from megasink.training.helper_process import live_with_rank, write
from megasink.training.stop import SIGNALS
from megasink.upstream.training import CHECKPOINT_WRITER, RESULTS_QUEUE

_SECONDS = 1.0  # how often a rank checks its writer


@contextmanager
def checkpoint_helpers(args: Namespace) -> Iterator[None]:
    """Start the checkpoint helpers in Megatron's place, and end them however training ends.

    Without --async-save there are none. Upstream starts a manager even then, only to return results
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
def _started_manager(args: Namespace) -> Iterator[SyncManager]:
    # Forked, as upstream does: the manager needs nothing else.
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    with starting_processes(SIGNALS):
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
        # The rank waits until the writer has copied its tensors. A writer that ended after the
        # last step is restarted for the checkpoint after it.
        with guard.bounded("handing a checkpoint to its writer"), starting_processes(SIGNALS):
            upstream(self, *call)

    with CHECKPOINT_WRITER.replacing(async_loop=staticmethod(write), schedule_async_call=schedule):
        try:
            # initialize_megatron then starts none: upstream's "forkserver", which forks writers on
            # demand, would die from a SIGTERM, and the writer's exit code would be lost.
            with starting_processes(SIGNALS):
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
        # Otherwise Python waits at exit until the queue has been read.
        queue_to_writer.cancel_join_thread()


@contextmanager
def _watched(helper: Callable[[], Any], name: str, args: Namespace) -> Iterator[None]:
    """End this rank when its helper dies or is stopped: upstream would wait forever."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            process = helper()
            if process is None:
                ended.wait(_SECONDS)
            elif multiprocessing.connection.wait([process.sentinel], _SECONDS):
                ended.wait(_SECONDS)  # a helper that was asked to end is cleared at once
                if helper() is process and not ended.is_set():
                    end(
                        f"{name} (process {process.pid}) ended, so the checkpoint that it was "
                        "writing is lost (was it killed for lack of memory?); earlier ones in "
                        f"{args.save} are intact"
                    )

    with guard.helping(lambda: getattr(helper(), "pid", None), name):
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()
