"""``python -m megasink``: what torchrun starts."""

import sys

from megasink.cli import main

if __name__ == "__main__":
    sys.exit(main())
