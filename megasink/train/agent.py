"""``python -m megasink.train.agent PID ARGUMENTS``: torchrun, which ends when its launcher does.

The launcher's death, by SIGKILL as well, is the agent's (prctl(2), PR_SET_PDEATHSIG: when the
thread that started it has gone, and the launcher has one); ranks look after the agent themselves.
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
        sys.exit(1)  # it has gone in between
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[2:])


if __name__ == "__main__":
    main()
