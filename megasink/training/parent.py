"""Processes that end with their parent, also if that is killed (prctl(2), PR_SET_PDEATHSIG).

Imports next to nothing: a process is to ask for it before its imports, which take seconds.
"""

import ctypes
import os
import signal
import threading

AGENT = "MEGASINK_AGENT"  # torchrun's process id, if the launcher started it
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def ends_with(parent: int, number: int = signal.SIGKILL) -> bool:
    """Ask for a signal at the end of the parent, which the kernel takes for its thread.

    Returns whether the parent is still there; else this process should end now.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def ends_by_itself() -> None:
    """Take `ends_with` back."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def forks_end_too() -> None:
    """Have every process that this one's main thread forks end with it: workers of data loaders.

    Those of torch ask every five seconds whether their parent is there.
    """
    parent, main = os.getpid(), threading.main_thread().ident
    forks: list[int] = []

    def before() -> None:
        # Another thread's end would count as that of the process.
        forks[:] = [1] if threading.get_ident() == main and os.getpid() == parent else []

    def in_child() -> None:
        if forks and not ends_with(parent):
            os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)
