"""A watchdog thread that ends a rank that would otherwise wait forever."""

import _thread
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import psutil

from megasink.training.die_with_parent import AGENT, ends_by_itself, forks_end_too
from megasink.training.stop import RankState, left, write_to_stderr, write_to_torchrun

TICK = 1.0  # seconds
HAS_ENDED = "has ended"
ON_DISK = "is waiting for a disk or network file system"  # any process, briefly
_STATES = {
    psutil.STATUS_STOPPED: "is stopped (kill -CONT {pid})",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: HAS_ENDED,
    psutil.STATUS_DISK_SLEEP: ON_DISK,
}


class Clock:
    """Count the seconds that this process was running, excluding those when it was stopped."""

    def __init__(self, tick: float = TICK):
        self.seconds = 0.0
        self._tick, self._last = tick, time.monotonic()

    def __call__(self) -> float:
        """Update and return the count. Call once per tick; longer gaps count as two ticks."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self._tick)
        self._last = now
        return self.seconds


class _Guard:
    """The state that the watchdog thread checks."""

    # A rank waits `timeout` seconds for another one, and shuts down within `end_seconds`.

    def __init__(self) -> None:
        self.timeout, self.end_seconds = 600.0, 60.0
        self._helpers: dict[str, Callable[[], int | None]] = {}
        self._bounds: dict[object, tuple[str, float, float]] = {}
        self._clock = Clock()
        self.is_looking = False

    def start(self) -> None:
        """Start the thread, which checks every second until the process ends."""
        if self.is_looking:
            return
        self.is_looking = True
        parent = int(os.environ.get(AGENT, os.getppid()))
        _thread.start_new_thread(self._look, (parent,))  # as in `stop.listen`
        ends_by_itself()
        forks_end_too()

    @contextlib.contextmanager
    def bounded(self, doing: str, seconds: float | None = None) -> Iterator[None]:
        """End the process if the body takes longer than `seconds`, by default the timeout."""
        key = self.bound(doing, seconds)
        try:
            yield
        finally:
            self._bounds.pop(key, None)

    def bound(self, doing: str, seconds: float | None = None) -> object:
        """Apply the limit of `bounded` until the process ends."""
        key = object()
        self._bounds[key] = (doing, self._clock.seconds, seconds or self.timeout)
        return key

    @contextlib.contextmanager
    def helping(self, pid: Callable[[], int | None], name: str) -> Iterator[None]:
        """End the process if the helper with this id (None: no helper) is stopped for too long."""
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
                end(f"its parent (process {parent}) has ended", code=1)
            for doing, began, seconds in list(self._bounds.values()):
                if now - began > seconds:
                    end(f"{doing} took longer than {seconds:.0f} s")
            for name, find in list(self._helpers.items()):
                pid = find()
                state = state_of(pid) if pid else None
                if not state or state == HAS_ENDED:
                    stopped.pop(name, None)
                elif now - stopped.setdefault(name, now) > self.timeout:
                    end(f"{name} (process {pid}) hung for {self.timeout:.0f} s: it {state}")
            time.sleep(TICK)


guard = _Guard()


def state_of(pid: int) -> str | None:
    """Describe why a local process makes no progress ("is stopped" etc.); None if unknown."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return HAS_ENDED
    return _STATES[status].format(pid=pid) if status in _STATES else None


def end(why: str, code: int = 2) -> NoReturn:
    """Print one line and exit: this rank waits for something that will not happen."""
    rank = os.environ.get("RANK", "0")
    write_to_torchrun(why)
    write_to_stderr(f"megasink: error: rank {rank} ended: {why}; {left(RankState.run_dir)}")
    os._exit(code)
