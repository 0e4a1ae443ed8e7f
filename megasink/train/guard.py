"""A thread of each rank that ends it where it would wait for ever.

It ends the rank when what started it has gone (a rank is a session of its own: nothing else would
tell it), when one of its helpers is stopped, and when a wait that we put a bound on takes longer.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import psutil

from megasink.train.stop import Told, left, write_to_stderr

TICK = 1.0  # seconds
AGENT = "MEGASINK_AGENT"  # the process of torchrun, where the launcher started it
HAS_ENDED = "has ended"
_STATES = {
    psutil.STATUS_STOPPED: "is stopped (kill -CONT {pid})",
    psutil.STATUS_TRACING_STOP: "is held by a debugger",
    psutil.STATUS_ZOMBIE: HAS_ENDED,
    psutil.STATUS_DISK_SLEEP: "waits for a disk or a network file system",
}


class Clock:
    """Seconds that this process was running: not those in which it was stopped itself."""

    def __init__(self, tick: float = TICK):
        self.seconds = 0.0
        self._tick, self._last = tick, time.monotonic()

    def __call__(self) -> float:
        """Called once per tick; a gap of many ticks counts as two."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self._tick)
        self._last = now
        return self.seconds


class _Guard:
    """What the thread looks at.

    Attributes:
        timeout: seconds that a rank waits for another, --distributed-timeout-minutes.
        is_looking: whether the thread runs.
    """

    def __init__(self) -> None:
        self.timeout = 600.0
        self._helpers: dict[str, Callable[[], int | None]] = {}
        self._bounds: dict[object, tuple[str, float, float]] = {}
        self._clock = Clock()
        self.is_looking = False

    def start(self) -> None:
        """Look every second, from now until the process ends."""
        if self.is_looking:
            return
        self.is_looking = True
        parent = int(os.environ.get(AGENT, os.getppid()))
        threading.Thread(target=self._look, args=(parent,), name="guard", daemon=True).start()

    @contextlib.contextmanager
    def bounded(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """End the process if the body takes longer than the timeout, or than some seconds."""
        key = self.bound(doing, seconds)
        try:
            yield
        finally:
            self._bounds.pop(key, None)

    def bound(self, doing: str, seconds: float | None = None) -> object:
        """As `bounded`, until the process ends."""
        key = object()
        self._bounds[key] = (doing, self._clock.seconds, seconds or self.timeout)
        return key

    @contextlib.contextmanager
    def helping(self, pid: Callable[[], int | None], name: str) -> Iterator[None]:
        """End the process if one that it needs is stopped for longer than the timeout.

        Args:
            pid: of the one that is there now; None for none.
            name: what it is called.
        """
        self._helpers[name] = pid
        try:
            yield
        finally:
            del self._helpers[name]

    def _look(self, parent: int) -> None:
        stopped: dict[str, float] = {}
        while True:
            now = self._clock()
            if os.getppid() != parent:
                end(f"what started it (process {parent}) has gone", code=1)
            for doing, began, seconds in list(self._bounds.values()):
                if now - began > seconds:
                    end(f"{doing} took longer than {seconds:.0f} s")
            for name, find in list(self._helpers.items()):
                pid = find()
                state = state_of(pid) if pid else None
                if not state or state == HAS_ENDED:
                    stopped.pop(name, None)
                elif now - stopped.setdefault(name, now) > self.timeout:
                    end(f"{name} (process {pid}) {state}, for longer than {self.timeout:.0f} s")
            time.sleep(TICK)


guard = _Guard()


def state_of(pid: int) -> str | None:
    """Why a process of this machine does not go on, if the system knows: "is stopped" etc."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return HAS_ENDED
    return _STATES[status].format(pid=pid) if status in _STATES else None


def end(why: str, code: int = 2) -> NoReturn:
    """One line, and the end of the process: what it waits for will not come."""
    rank = os.environ.get("RANK", "0")
    write_to_stderr(f"megasink: error: rank {rank} ended: {why}; {left(Told.run_dir)}")
    os._exit(code)
