"""`python -m megasink` that draws nothing: figures take longer than all the rest of a test."""

import sys

from megasink.cli import main
from megasink.report import pages

pages.figures = lambda analyses, kinds: []

if __name__ == "__main__":
    sys.exit(main())
