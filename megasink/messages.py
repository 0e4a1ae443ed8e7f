"""Messages of other packages go to a log; the terminal shows those of megasink and of the user.

Importing Megatron, transformers and torch warns of much that no user of megasink can change. While
`sorting` is active, warnings and log records below ERROR are written to the log if a package made
them, and shown if the user's own code did, such as a plugin. Errors, tracebacks and what native
code writes to stderr are left alone. Training ranks need none of this: all their output goes to
RUN/logs.
"""

import contextlib
import logging
import os
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.errors import Stopped

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
# A warning is often attributed to the caller, which may be a file of ours.
_PACKAGES = tuple(
    f"{folder}{os.sep}" for folder in (*map(sysconfig.get_path, _PATHS), Path(__file__).parent)
)
_MOST_BYTES = 1 << 20  # of a log, which commands append to

_active: "_Log | None" = None


def is_sorting() -> bool:
    """Whether messages are sorted now, so that nothing else needs to silence them."""
    return _active is not None


def log_of(command: str) -> Path:
    """Return the log of a command: ~/.local/state/megasink/COMMAND.log, or in XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state", "megasink", f"{command}.log")


@contextlib.contextmanager
def sorting(command: str) -> Iterator[None]:
    """Write messages of packages to the log of a command; say where it is if the command fails."""
    global _active
    outer, of_loggers, show = _active, logging.getLoggerClass(), warnings.showwarning
    log = _active = _Log(log_of(command), show)
    # Loggers that packages create from now on: many have a handler that writes to stderr.
    logging.setLoggerClass(_Logger)
    warnings.showwarning = log.warning
    try:
        yield
    except (SystemExit, KeyboardInterrupt, Stopped):
        raise
    except BaseException:
        if log.count and os.environ.get("RANK", "0") == "0":
            s = "s" if log.count > 1 else ""
            with contextlib.suppress(OSError):  # the terminal was closed
                print(
                    f"megasink: {log.count} message{s} of other packages: {log.path}",
                    file=sys.stderr,
                )
        raise
    finally:
        warnings.showwarning = show
        logging.setLoggerClass(of_loggers)
        _active = outer


class _Log:
    """The log of one command, opened at the first message.

    Attributes:
        count: messages written.
    """

    def __init__(self, path: Path, show: Any) -> None:
        self.path, self.count, self._show = path, 0, show

    def warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        """Sort a warning; in the place of `warnings.showwarning`."""
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is not None or not _of_package(filename) or not self.write(text):
            self._show(message, category, filename, lineno, file, line)

    def record(self, record: logging.LogRecord) -> bool:
        """Append a record, if it is a warning; return whether it needs no other handler."""
        text = f"{record.levelname}:{record.name}:{record.getMessage()}"
        return record.levelno < logging.WARNING or self.write(text)

    def write(self, text: str) -> bool:
        """Append a message; return whether the log could be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.path.is_file() or self.path.stat().st_size > _MOST_BYTES
            with self.path.open("w" if is_new and not self.count else "a") as file:
                if not self.count:
                    file.write(f"# {time.strftime('%Y-%m-%dT%H:%M:%S%z')}, pid {os.getpid()}\n")
                file.write(f"{text.rstrip()}\n")
        except (OSError, UnicodeError):
            return False
        self.count += 1
        return True


class _Logger(logging.Logger):
    """A logger whose records are sorted before any handler sees them."""

    def callHandlers(self, record: logging.LogRecord) -> None:
        log = _active
        is_theirs = record.levelno < logging.ERROR and _of_package(record.pathname)
        if log is None or not is_theirs or not log.record(record):
            super().callHandlers(record)


def _of_package(filename: str) -> bool:
    """Whether a file is installed, or none at all, such as "<frozen importlib>"."""
    return filename.startswith(_PACKAGES) or not Path(filename).is_file()
