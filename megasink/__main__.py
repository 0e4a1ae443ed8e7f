"""Entry point for ``python -m megasink``, as launched by torchrun."""

import sys

from megasink.cli import main

if __name__ == "__main__":
    sys.exit(main())
