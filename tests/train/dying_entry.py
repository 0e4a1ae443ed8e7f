"""``megasink.train`` as one real process that dies, or runs out of disk, at a chosen moment.

Usage: python -m tests.train.dying_entry MOMENT FLAGS. MOMENT is step:N (SIGKILL after the backward
pass of step N), save:N (SIGKILL in the N-th save, when the tensors are written and the index is
not) or full:N (before the N-th save the disk runs full).
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasink.process import prepare_process
from megasink.train.pretrain import main


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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    """The device under the tensors of the checkpoint of step 4 has no room."""
    run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder = run / "checkpoints" / "iter_0000004"
    folder.mkdir()
    (folder / "__0_0.distcp").symlink_to("/dev/full")


if __name__ == "__main__":
    kind, _, count = sys.argv[1].partition(":")
    prepare_process([])
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import training

    from megasink.balance.tracker import HeadTracker

    if kind == "step":
        HeadTracker.start_reduction = at_call(int(count), die, HeadTracker.start_reduction)
    elif kind == "save":
        finish = FileSystemWriterAsync.finish
        FileSystemWriterAsync.finish = at_call(int(count), die, finish)
    else:
        training.save_checkpoint = at_call(int(count), fill_disk, training.save_checkpoint)
    sys.exit(main(sys.argv[2:]))
