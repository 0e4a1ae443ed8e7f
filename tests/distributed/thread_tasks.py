"""Tasks: the threads of a worker, by name."""

from collections import Counter
from contextlib import suppress
from pathlib import Path


def threads() -> dict[str, int]:
    """How many native threads this worker has, by their names."""
    names: Counter[str] = Counter()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names[path.read_text().strip()] += 1
    return dict(names)
