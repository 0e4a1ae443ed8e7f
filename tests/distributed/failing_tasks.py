"""Tasks that go wrong in the ways that a task can go wrong. No torch: they start in no time."""

import os
import time

RANKS = []


def remember(rank_marker: str) -> list[str]:
    """A task that works: what this worker was told so far."""
    RANKS.append(rank_marker)
    return RANKS


def raise_here() -> None:
    """Fail on every rank."""
    raise KeyError("a message that the test looks for")


def die(code: int) -> None:
    """End the process, as a segmentation fault or the kernel's memory killer would."""
    print("last words", flush=True)
    os._exit(code)


def hang() -> None:
    """Never answer."""
    time.sleep(600)
