"""Processes that end with their parent, even if it is killed (prctl(2), PR_SET_PDEATHSIG).

Imports next to nothing: a process asks for this before its imports, which take seconds.
"""

import ctypes
import os
import signal
import threading

AGENT = "MEGASINK_AGENT"  # torchrun's process id, if the launcher started it
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def ends_with(parent: int, number: int = signal.SIGKILL) -> bool:
    """Ask for a signal at the end of the parent; return whether it is still alive."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def ends_by_itself() -> None:
    """Undo `ends_with`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def forks_end_too() -> None:
    """Have every process forked by the main thread end with it: workers of data loaders."""
    parent, main = os.getpid(), threading.main_thread().ident
    forks: list[int] = []

    def before() -> None:
        # Another thread's end would count as the end of the process.
        forks[:] = [1] if threading.get_ident() == main and os.getpid() == parent else []

    def in_child() -> None:
        if forks and not ends_with(parent):
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)
