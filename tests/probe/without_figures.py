"""`python -m megasink` that draws nothing: figures take longer than all the rest of a test."""

import sys

from megasink.cli import main
from megasink.probe import write

write.figures = lambda analyses: {}

if __name__ == "__main__":
    sys.exit(main())
