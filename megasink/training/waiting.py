"""Which host of several this is, which of its ranks speaks, and for whom it waits."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

HERE = socket.gethostname()
_FIRST_SECONDS, _SECONDS = 20.0, 60.0


def on_several_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks of this job are on more than one host, by torchrun's variables."""
    world, here = (int(environment.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world != here


def is_first_here() -> bool:
    """Whether this is the rank that speaks for its host."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


@contextlib.contextmanager
def waiting(whom: Callable[[], str], *, of_rank: bool = True) -> Iterator[None]:
    """Say on each host, after 20 s and then every minute, for whom the body waits.

    Args:
        whom: called in another thread.
        of_rank: whether it is a rank that waits, of which the first of each host speaks.
    """
    ended, began = threading.Event(), time.monotonic()

    def say() -> None:
        seconds = _FIRST_SECONDS
        while not ended.wait(seconds):
            waited = time.monotonic() - began
            # The store or stderr is gone: the body will find out.
            with contextlib.suppress(RuntimeError, OSError):
                text = f"megasink: {HERE} has waited {waited:.0f} s for {whom()}"
                print(text, file=sys.stderr, flush=True)
            seconds = _SECONDS

    if not of_rank or (on_several_hosts() and is_first_here()):
        threading.Thread(target=say, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
