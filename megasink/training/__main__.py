"""``python -m megasink.training FLAGS``: one rank, as torchrun starts it."""

import sys

from megasink.training.pretrain import main

# The guard is needed: checkpoint writers are spawned processes that import this module again.
if __name__ == "__main__":
    sys.exit(main())
