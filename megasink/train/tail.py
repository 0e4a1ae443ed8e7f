"""Reads a growing file of JSON lines, each line once."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class NewLines:
    """The records that a JSON-lines file gained since the last call.

    Args:
        path: the file, which need not exist yet. What it holds now counts as read.
    """

    def __init__(self, path: Path):
        self._path = path
        self._read = 0
        self()

    def __call__(self) -> list[dict[str, Any]]:
        """Whole lines only; those that a kill cut short are passed over."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._read:
            # A resumed run drops the steps that it runs again; what is left was read before.
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
