"""``python tied.py PID COMMAND``: a command of megasink, tied to the life of a grid.

It gets SIGTERM when the grid ends, even on SIGKILL.
"""

import signal
import sys

from megasink.training.die_with_parent import ends_with


def main() -> int:
    """Run the command after the grid's process id."""
    if not ends_with(int(sys.argv[1]), signal.SIGTERM):
        return 1  # the grid ended in between
    from megasink.cli import main as command

    sys.argv = ["megasink", *sys.argv[2:]]
    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
