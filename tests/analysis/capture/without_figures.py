"""`python -m megasink` that draws nothing: figures take longer than all the rest of a test."""

import sys

from megasink.analysis.pages import analysis_page as pages
from megasink.cli import main

pages.figures = lambda analyses, kinds: []

if __name__ == "__main__":
    sys.exit(main())
