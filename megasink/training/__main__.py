"""``python -m megasink.training FLAGS``: one rank, as torchrun starts it."""

import os
import sys

from megasink.training.die_with_parent import AGENT, ends_with

# Needed: checkpoint writers are spawned processes that import this module again.
if __name__ == "__main__":
    # Until the guard checks it itself; the imports take seconds.
    if not ends_with(int(os.environ.get(AGENT, os.getppid()))):
        sys.exit(1)
    from megasink.training.pretrain import main

    sys.exit(main())
