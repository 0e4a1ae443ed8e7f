"""``megasink.training`` as one real process that dies, or runs out of disk, at a chosen moment.

Usage: python -m tests.training.dying_entry MOMENT FLAGS. A moment is step:N (SIGKILL after the
backward pass of step N), save:N (SIGKILL in the N-th save, when the tensors are written and the
index is not), full:N (before the N-th save the disk runs full) or nan:N (step N has a loss that is
no number); when the N-th asynchronous save has been handed over async:N (SIGKILL), writer:N
(SIGKILL to the writer) or term:N (SIGTERM to the whole process group, as torchrun sends it). When a
function of Megatron's training.py is called for the N-th time, SIGNAL@FUNCTION:N sends this process
a signal, and the function goes on when it was heard. From the N-th line on metrics:N has no room
for metrics.jsonl, and board:N none for TensorBoard's file.
The process that writes asynchronous checkpoints is slow, so that training goes on meanwhile.
"""

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasink.cpu.prepare_process import prepare_process
from megasink.training.pretrain import main
from megasink.training.stop import RankState
from tests.waiting import until


def at_call(number: int, act: Callable[[], None], function: Callable[..., Any]) -> Any:
    """The function; `act` comes before its `number`-th call."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return function(*args, **kwargs)

    return counted


def at_message(
    text: str, number: int, act: Callable[[], None], function: Callable[..., Any]
) -> Any:
    """The function that prints; `act` comes after its `number`-th message with the text."""
    calls = 0

    def counted(message: str) -> Any:
        nonlocal calls
        function(message)
        calls += text in message
        if calls == number and text in message:
            act()

    return counted


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    """The device under the tensors of the checkpoint of step 4 has no room."""
    run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder = run / "checkpoints" / "iter_0000004"
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to("/dev/full")


def end_group() -> None:
    """From another process, as torchrun's: helpers obey their own rank."""
    assert os.getpgrp() == os.getpid()
    # Not by `kill`: that of procps 4.0.2 takes a negative number for an option, and its first
    # digit for the target, so that it may end every process of the machine.
    send = f"import os, signal; os.killpg({os.getpgrp()}, signal.SIGTERM)"
    subprocess.run([sys.executable, "-c", send], check=True, start_new_session=True)


def kill_writer() -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    os.kill(PersistentAsyncCaller._persistent_process.pid, signal.SIGKILL)


def no_number(step: int, loss_func: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training import get_args

    def loss(*args: Any) -> Any:
        *others, training, token_losses = args
        if training and get_args().curr_iteration == step - 1:
            token_losses = token_losses * float("nan")
        return loss_func(*others, training, token_losses)

    return loss


def interrupt(number: int) -> None:
    """Return once the signal is to be obeyed after the step; it ends the process elsewhere."""
    os.kill(os.getpid(), number)
    until(lambda: RankState.signal)


def fill_metrics(number: int, write: Callable[..., Any]) -> Callable[..., Any]:
    """MetricsFile.write, with the file on a full device from a call on."""
    calls = 0

    def without_room(self: Any, record: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            self._file = self._file and Path("/dev/full").open("a")  # noqa: SIM115
        return write(self, record)

    return without_room


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.save in the writer; MEETS is a checkpoint whose save begins before others are whole."""

    def slow(value: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        path, later = Path(str(getattr(file, "name", ""))), os.environ.get("MEETS")
        if later and path.parent.name == "iter_0000004":
            until(path.parent.with_name(later).exists)
        return function(value, file, *args, **kwargs)

    return slow


def train(moment: str) -> int:
    """Train with the flags of sys.argv, and die."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import checkpointing, training
    from tensorboard.summary.writer.record_writer import RecordWriter

    from megasink.balance.gate_sums import HeadSums
    from megasink.training import forward_step
    from megasink.training.metrics_file import MetricsFile

    kind, _, text = moment.partition(":")
    count = int(text)
    if kind == "step":
        HeadSums.start_reduction = at_call(count, die, HeadSums.start_reduction)
    elif kind == "save":
        FileSystemWriterAsync.finish = at_call(count, die, FileSystemWriterAsync.finish)
    elif kind in ("async", "writer", "term"):
        if kind == "async":
            os.environ["MEETS"] = f"iter_{2 * count:07d}"  # in the writer, which inherits it
        say = checkpointing.print_rank_0
        act = {"async": die, "writer": kill_writer, "term": end_group}[kind]
        checkpointing.print_rank_0 = at_message("scheduled an async", count, act, say)
    elif "@" in kind:
        name, _, function = kind.partition("@")
        act = functools.partial(interrupt, getattr(signal, name))
        setattr(training, function, at_call(count, act, getattr(training, function)))
    elif kind == "metrics":
        MetricsFile.write = fill_metrics(count, MetricsFile.write)
    elif kind == "board":
        RecordWriter.write = at_call(count, full, RecordWriter.write)
    elif kind == "nan":
        forward_step.loss_func = no_number(count, forward_step.loss_func)
    else:
        training.save_checkpoint = at_call(count, fill_disk, training.save_checkpoint)
    return main(sys.argv[1:])


if __name__ == "__mp_main__":  # in the writer: torch.save is called for every tensor
    import torch

    torch.save = slowly(torch.save)

if __name__ == "__main__":
    prepare_process()
    moment = sys.argv.pop(1)
    sys.exit(train(moment))
