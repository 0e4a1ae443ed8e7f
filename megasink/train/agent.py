"""``python -m megasink.train.agent PID ARGUMENTS``: torchrun, tied to the life of its launcher.

The agent dies with the launcher, even on SIGKILL (prctl(2), PR_SET_PDEATHSIG, which follows the
parent thread; the launcher has only one). The ranks monitor the agent themselves.
"""

import ctypes
import os
import signal
import sys

from megasink.train.guard import AGENT

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run torchrun with the arguments after the launcher's process id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # the launcher ended in between
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[2:])


if __name__ == "__main__":
    main()
