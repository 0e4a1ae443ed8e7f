"""Read a growing JSON-lines file, each line once."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class NewLines:
    """Read the records appended to a JSON-lines file, which may not exist yet, since the last call.

    Its current contents count as read.
    """

    def __init__(self, path: Path):
        self._path = path
        self._read = 0
        self()

    def __call__(self) -> list[dict[str, Any]]:
        """Return the new complete lines, without those truncated by a kill."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._read:
            # A resumed run drops the steps that it repeats; the rest was read before.
            self._read = size
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        records = []
        for line in whole.splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records
