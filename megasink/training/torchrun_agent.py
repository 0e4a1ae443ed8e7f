"""``python -m megasink.training.torchrun_agent PID FAILURES ARGUMENTS``: tied to its launcher.

The file FAILURES lists the failed ranks by time, as [rank, exit code, process id]. The agent dies
with the launcher, even on SIGKILL (the launcher has only one thread, whose end counts). The ranks
monitor the agent themselves.
"""

import json
import os
import sys
from pathlib import Path

from megasink.training.die_with_parent import AGENT, ends_with


def main() -> None:
    """Run torchrun with the arguments after the first two."""
    if not ends_with(int(sys.argv[1])):
        sys.exit(1)  # the launcher ended in between
    os.environ[AGENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[3:])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
        ended = [(rank, failure.exitcode, failure.pid) for rank, failure in failures]
        Path(sys.argv[2]).write_text(json.dumps(ended))
        raise


if __name__ == "__main__":
    main()
