"""Tasks that go wrong in the ways that a task can go wrong. Most start in no time: no torch."""

import os
import time
from pathlib import Path

RANKS = []


def remember(rank_marker: str) -> list[str]:
    """A task that works: what this worker was told so far."""
    RANKS.append(rank_marker)
    return RANKS


def raise_here() -> None:
    """Fail on every rank."""
    raise KeyError("a message that the test looks for")


def leave_a_group() -> None:
    """Make a process group of its own, and forget to destroy it."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def die(code: int) -> None:
    """End the process, as a segmentation fault or the kernel's memory killer would."""
    print("last words", flush=True)
    os._exit(code)


def hang(folder: str) -> None:
    """Never answer, and say so by a file."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)
