"""``python -m megasink.grid.tied PID COMMAND``: a command of megasink, tied to the life of a grid.

It gets SIGTERM when the grid ends, even on SIGKILL (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command after the grid's process id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        return 1  # the grid ended in between
    from megasink.cli import main as command

    sys.argv = ["megasink", *sys.argv[2:]]
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
