"""``python -m megasink.training.agent PID ARGUMENTS``: torchrun, tied to the life of its launcher.

The agent dies with the launcher, even on SIGKILL (the launcher has only one thread, whose end
counts). The ranks monitor the agent themselves.
"""

import os
import sys

from megasink.training.parent import AGENT, ends_with


def main() -> None:
    """Run torchrun with the arguments after the launcher's process id."""
    if not ends_with(int(sys.argv[1])):
        sys.exit(1)  # the launcher ended in between
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.run import main as torchrun

    torchrun(sys.argv[2:])


if __name__ == "__main__":
    main()
