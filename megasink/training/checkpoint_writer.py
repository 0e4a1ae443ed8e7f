"""Write checkpoints while training: helper processes, the form of the optimizer's state, retention.

Helpers of asynchronous checkpoints end together with their rank. Upstream's writer and manager
outlive a killed rank, whose folder they may still write, die from a SIGTERM meant for the rank, and
leave it waiting forever if one of them dies.

"Fully reshardable" state of the distributed optimizer loads under any layout, but every
data-parallel rank gathers its whole model-parallel shard in float32 for each save and load
(core/optimizer/distrib_optimizer.py:1690). "dp_reshardable" state is written as it is, and loads
under another data parallelism alone.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    PersistentAsyncCaller,
    _set_process_qos,
)
from megatron.training import get_args, training
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import append_to_progress_log

from megasink.checkpoints.damage import checkpoint_path, damage
from megasink.checkpoints.find import delete, newest_checkpoint
from megasink.console.printable import say
from megasink.console.signals import starting_processes
from megasink.training.async_checkpoint_process import live_with_rank, write
from megasink.training.checks.host_memory import CHECKPOINT_BYTES, available
from megasink.training.stop import SIGNALS
from megasink.training.watchdog import end, guard
from megasink.upstream import training_patches as patches

_SECONDS = 1.0  # how often a rank checks its writer
_SHARE = 0.5  # of a host's free memory, which gathering the optimizer's state may take


@contextmanager
def checkpoint_helpers(args: Namespace) -> Iterator[None]:
    """Start the helpers of --async-save in Megatron's place, and end them with training."""
    with ExitStack() as stack:
        results: Any = queue.Queue()
        if args.async_save:
            results = stack.enter_context(_started_manager(args)).Queue()
            stack.enter_context(_started_writer(args))
        stack.enter_context(patches.RESULTS_QUEUE.replacing(_results_queue=results))
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
    upstream = PersistentAsyncCaller.schedule_async_call

    def schedule(self: Any, *call: Any) -> None:
        # The rank waits until the writer has copied its tensors. A writer that ended after the
        # last step is restarted for the checkpoint after it.
        with guard.bounded("handing a checkpoint to its writer"), starting_processes(SIGNALS):
            upstream(self, *call)

    with patches.CHECKPOINT_WRITER.replacing(
        async_loop=staticmethod(write), schedule_async_call=schedule
    ):
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
                        f"{name} (process {process.pid}) ended, so its checkpoint is lost "
                        f"(out of memory?); earlier checkpoints in {args.save} are intact"
                    )

    with guard.helping(lambda: getattr(helper(), "pid", None), name):
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            ended.set()


@contextmanager
def keeping_whole_checkpoints(*, checksums: bool) -> Iterator[None]:
    """Make Megatron's training loop keep a checkpoint that is intact.

    It saves an iteration again over the first files if the next step gives NaN
    (core/rerun_state_machine.py:411), and deletes a previous checkpoint (--save-retain-interval)
    without checking the new one, which happens here (`checksums` included).
    """
    save = training.save_checkpoint

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        options = get_args()
        path = checkpoint_path(Path(options.save), iteration)
        # Broadcast, because the file system may show rank 0's folder to other ranks later.
        device = torch.cuda.current_device()
        is_intact = torch.tensor([path.is_dir()], dtype=torch.int32, device=device)
        torch.distributed.broadcast(is_intact, 0)
        if is_intact.item() and not kwargs.get("non_persistent_ckpt"):
            maybe_finalize_async_save(blocking=True)
            if options.rank == 0:
                is_intact.fill_(damage(path) is None)
            torch.distributed.broadcast(is_intact, 0)
            if is_intact.item():
                if options.rank == 0:
                    say(f"megasink: keeping the intact checkpoint of step {iteration}")
                return None
        return save(iteration, *args, **kwargs)

    # With --async-save upstream deletes in a process that it forks, else in a thread.
    ended = multiprocessing.get_context("fork").Event()
    retain = functools.partial(delete_previous, checksums=checksums, has_ended=ended.is_set)
    with (
        patches.WHOLE_CHECKPOINTS.replacing(save_checkpoint=save_checkpoint),
        patches.RETAINED_CHECKPOINTS.replacing(_async_delete_checkpoint_impl=retain),
    ):
        try:
            yield
        finally:
            ended.set()


class _EndedError(Exception):
    """Raised to stop a verification because training has ended."""


def delete_previous(
    save_path: str,
    iteration_to_delete: int,
    log_progress: bool = False,
    lower_priority: bool = False,
    cpu_priority: int | None = None,
    io_priority: int | None = None,
    *,
    checksums: bool,
    has_ended: Callable[[], bool],
) -> None:
    """Delete a checkpoint that --save-retain-interval does not keep, if a newer one is intact."""
    # Called like Megatron's function (training/checkpointing.py:1142). If training `has_ended`
    # meanwhile, the checkpoint stays.
    if lower_priority:
        _set_process_qos(cpu_priority=cpu_priority, io_priority=io_priority)
    folder = Path(save_path)
    newest = newest_checkpoint(folder)

    def tell(_: int) -> None:
        if has_ended():
            raise _EndedError

    try:
        if newest is None or newest == iteration_to_delete:
            say(f"megasink: keeping the checkpoint of step {iteration_to_delete}: none is newer")
            return
        if problem := damage(checkpoint_path(folder, newest), checksums=checksums, tell=tell):
            say(
                f"megasink: warning: the checkpoint of step {newest} is damaged ({problem}): the "
                f"one of step {iteration_to_delete} is kept"
            )
            return
        if delete(checkpoint_path(folder, iteration_to_delete)) and log_progress:
            note = f"Deleted checkpoint\tIteration: {iteration_to_delete}"
            append_to_progress_log(save_path, note, barrier=False)
    except _EndedError:
        say(f"megasink: keeping the checkpoint of step {iteration_to_delete}: training has ended")
    except OSError as error:  # the run does not depend on it
        say(f"megasink: the checkpoint of step {iteration_to_delete} cannot be deleted ({error})")


def choosing_by_size(args: Namespace) -> Callable[[Any], Any]:
    """Return a hook for ``pre_wrap_hooks`` that sets --dist-ckpt-optim-fully-reshardable."""

    def choose(models: Any) -> Any:
        if args.distrib_optim_fully_reshardable_mem_efficient:
            args.dist_ckpt_optim_fully_reshardable = True
        if args.dist_ckpt_optim_fully_reshardable is None:
            args.dist_ckpt_optim_fully_reshardable = _fits(args, models)
        return models

    return choose


def _fits(args: Namespace, models: Any) -> bool:
    """Return whether it fits on every host. Performs one all-reduce."""
    if not args.use_distributed_optimizer or args.fake_process_group:
        return True
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = (
        CHECKPOINT_BYTES * ranks * sum(p.numel() for model in models for p in model.parameters())
    )
    worst = torch.tensor([needed / max(available(), 1), needed], dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    share, most = worst.tolist()
    if args.rank == 0 and share > _SHARE:
        print(
            f"checkpoints: gathering the optimizer's state would take {most / 1e9:.3g} GB of a "
            f"host's memory, {share:.0%} of the free memory. It is saved in shards instead, "
            "so only the data-parallel size may change later "
            "(--dist-ckpt-optim-fully-reshardable forces gathering)",
            flush=True,
        )
    return share <= _SHARE
