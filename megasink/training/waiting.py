"""Name this host, choose the rank that reports, and report what it is waiting for."""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megasink.errors import UserError

RANKS = "MEGASINK_RANKS"
"""Environment variable with the number of ranks that the start command expects."""
_FIRST_SECONDS, _SECONDS = 20.0, 60.0
_APART_SECONDS = 10.0  # torchrun drops a host whose clock is 15 s off
_address = ""  # of this host, if another one of the job has the same name


def here() -> str:
    """Return the name of this host in messages; containers of one job may have the same name."""
    return socket.gethostname() + _address


def same_name_elsewhere(address: str) -> None:
    """Add this host's address to its name from now on."""
    global _address
    _address = f" ({address})"


def node() -> str:
    """Return torchrun's number of this host, which is unique in a job."""
    return os.environ.get("GROUP_RANK", "0")


def machine() -> dict[str, Any]:
    """Identify the scope of process ids: each container on a host has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace}


def on_several_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job's ranks are on more than one host, by torchrun's variables."""
    world, here = (int(environment.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world != here


def refuse_another_world() -> None:
    """Refuse a job of a different size than its command expects, with the likely reasons."""
    expected, world = os.environ.get(RANKS), os.environ.get("WORLD_SIZE", "1")
    if expected is not None and expected != world:
        raise UserError(
            f"{here()}: {world} rank{' has' if world == '1' else 's have'} met, but NNODES x "
            f"RANKS_PER_NODE is {expected}: give every host the same NNODES and RANKS_PER_NODE, "
            "and synchronize the clocks with NTP (torchrun drops a host whose clock is 15 s off)"
        )


def clocks_apart(its: str, mine: str, least: float, most: float) -> str:
    """Describe a clock that is ahead of this one by `least` to `most` seconds; empty if near."""
    ahead = least if least > 0 else min(most, 0.0)
    if abs(ahead) <= _APART_SECONDS:
        return ""
    return (
        f"the clock of {its} differs by {ahead:+.0f} s from that of {mine} (synchronize the clocks "
        "with NTP: torchrun drops a host whose clock is 15 s off)"
    )


def is_first_here() -> bool:
    """Return whether this rank reports for its host."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def until(done: Callable[[], object], seconds: float = math.inf, pause: float = 0.05) -> bool:
    """Poll until a condition holds, or for some seconds; return whether it holds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


@contextlib.contextmanager
def waiting(whom: Callable[[], str], *, of_rank: bool = True) -> Iterator[None]:
    """Report, after 20 s and then every minute, what the body waits for, once per host."""
    ended, began = threading.Event(), time.monotonic()

    def say() -> None:
        seconds = _FIRST_SECONDS
        while not ended.wait(seconds):
            waited = time.monotonic() - began
            # The store or stderr is gone: the body will notice.
            with contextlib.suppress(RuntimeError, OSError):
                text = f"megasink: {here()} has waited {waited:.0f} s for {whom()}"
                print(text, file=sys.stderr, flush=True)
            seconds = _SECONDS

    if not of_rank or (on_several_hosts() and is_first_here()):
        threading.Thread(target=say, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
