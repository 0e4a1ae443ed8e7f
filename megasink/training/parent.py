"""End with the parent process, also if that is killed (prctl(2), PR_SET_PDEATHSIG)."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def ends_with(parent: int, number: int = signal.SIGKILL) -> bool:
    """Ask for a signal at the end of the parent, which the kernel takes for its thread.

    Args:
        parent: the process id that the parent had when it started this process.

    Returns:
        whether the parent is still there; else this process should end now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
