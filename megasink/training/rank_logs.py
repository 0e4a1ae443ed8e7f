"""Read the messages of ranks from their logs."""

import re
from pathlib import Path

# Name in the folder of logs: agent.py's list of failed ranks.
FAILURES = "failures.json"
_ERROR = "megasink: error: "
# In the messages of runs that ended because of their loss.
DIVERGES = "the training loss diverges"
NOT_FINITE = "NaN or Inf in the loss or a gradient"


def first_error(logs: Path) -> str | None:
    """Return the error message of the first process in a folder that has one, or None."""
    for path in sorted(logs.rglob("stderr.log")):
        text = path.read_text(errors="replace")
        if _ERROR in text:
            # Include a ConfigError's list, but not later output of others.
            message = text.rpartition(_ERROR)[2]
            return message[: re.match(r".*(\n  \d+\. .*)*", message).end()].strip()  # type: ignore[union-attr]
    return None


def raised(logs: Path) -> tuple[Path, str] | None:
    """Return the first traceback's log and its last line, or None."""
    line = r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)$"
    for path in sorted(logs.rglob("stderr.log")):
        if lines := re.findall(line, path.read_text(errors="replace"), re.M):
            return path, lines[-1]
    return None
