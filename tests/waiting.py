"""Wait for the state that a test asserts, never for time; look at processes.

``python -m tests.waiting SIGNAL MODULE:FUNCTION NUMBER COMMAND...`` is the command of megasink in a
process that sends itself the signal in the NUMBER-th call of a function, wherever the load of the
machine has that fall: SIGKILL, or SIGSTOP to wait there for what a test does to it.
"""

import contextlib
import functools
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forkserver import HANG_SECONDS


def until[Found](
    condition: Callable[[], Found], or_say: Callable[[], object] | None = None
) -> Found:
    """What the condition returns once that counts as true.

    Args:
        or_say: what a hang fails with; ``condition`` itself fails for what can no more come true.
    """
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, or_say and or_say()
        time.sleep(0.01)
    return found


def state(pid: int) -> str:
    """The letter of a process's state, such as T for a stopped one; "" for one that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs, or could."""
    return state(pid) not in ("", "Z", "X")


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def session(leader: int) -> list[str]:
    """Command lines of what a leader of a session has started, itself left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (pid := int(path.name)) != leader and os.getsid(pid) == leader and is_alive(pid):
                found.append((path / "cmdline").read_text().replace("\0", " "))
    return found


def at_call(owner: Any, name: str, number: int, send: signal.Signals) -> None:
    """Have this process send itself a signal before the `number`-th call of a function."""
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), send)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    from megasink.cli import main

    name, where, count, *command = sys.argv[1:]
    module, _, path = where.partition(":")
    *outer, last = path.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    at_call(owner, last, int(count), signal.Signals[name])
    sys.exit(main(command))
