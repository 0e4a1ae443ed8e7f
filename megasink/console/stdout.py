"""Standard output: characters that it cannot encode, and tables of any width."""

import contextlib
import io
import sys
from typing import Any


def escape_output() -> None:
    """Print what the output cannot encode as escapes: file names need not be UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # stdout was replaced by a file that cannot seek
            sys.stdout.reconfigure(errors="backslashreplace")


def wide_console() -> Any:
    """Return a rich console for tables; without a terminal, no table is wrapped."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=1000)
