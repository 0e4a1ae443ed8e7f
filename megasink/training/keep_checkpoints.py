"""Never overwrite an intact checkpoint, nor delete the one before a damaged one."""

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasink.checkpoints.find import delete, newest_checkpoint
from megasink.checkpoints.intact import checkpoint_path, damage
from megasink.console.printable import say
from megasink.upstream.training import RETAINED_CHECKPOINTS, WHOLE_CHECKPOINTS


@contextmanager
def keeping_whole_checkpoints(*, checksums: bool) -> Iterator[None]:
    """Make Megatron's training loop skip saving an iteration whose checkpoint is intact.

    Megatron saves an iteration again if the next step gives NaN or Inf
    (core/rerun_state_machine.py:411), over the first files: a kill or a full disk during that save
    would destroy the newest good checkpoint. With --save-retain-interval it also deletes the
    previous checkpoint without checking the new one, which happens here (`checksums` included),
    in the background like the deletion.
    """
    import torch
    from megatron.training import get_args, training
    from megatron.training.async_utils import maybe_finalize_async_save

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
    retain = functools.partial(
        delete_previous, checksums=checksums, has_ended=ended.is_set, lower=_lower_priority
    )
    with (
        WHOLE_CHECKPOINTS.replacing(save_checkpoint=save_checkpoint),
        RETAINED_CHECKPOINTS.replacing(_async_delete_checkpoint_impl=retain),
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
    lower: Callable[[int | None, int | None], None],
) -> None:
    """Delete a checkpoint that --save-retain-interval does not keep, once a newer one is intact.

    Called like Megatron's function of this name (training/checkpointing.py:1142), with the newer
    checkpoint in the tracker file. Verifies its sizes, or its `checksums`. If training `has_ended`
    meanwhile, the checkpoint stays. `lower` sets the priority of a process that upstream has forked
    for this.
    """
    if lower_priority:
        lower(cpu_priority, io_priority)
    folder = Path(save_path)
    newest = newest_checkpoint(folder)

    def tell(_: int) -> None:
        if has_ended():
            raise _EndedError

    try:
        problem: str | None = "there is none"
        if newest is not None and newest != iteration_to_delete:
            problem = damage(checkpoint_path(folder, newest), checksums=checksums, tell=tell)
        if problem is not None:
            say(
                f"megasink: warning: the checkpoint of step {newest} is damaged ({problem}): the "
                f"one of step {iteration_to_delete} is kept"
            )
            return
        if delete(checkpoint_path(folder, iteration_to_delete)) and log_progress:
            from megatron.training.checkpointing import append_to_progress_log

            note = f"Deleted checkpoint\tIteration: {iteration_to_delete}"
            append_to_progress_log(save_path, note, barrier=False)
    except _EndedError:
        say(f"megasink: keeping the checkpoint of step {iteration_to_delete}: training has ended")
    except OSError as error:  # the run does not depend on it
        say(f"megasink: the checkpoint of step {iteration_to_delete} cannot be deleted ({error})")


def _lower_priority(cpu_priority: int | None, io_priority: int | None) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import _set_process_qos

    _set_process_qos(cpu_priority=cpu_priority, io_priority=io_priority)
