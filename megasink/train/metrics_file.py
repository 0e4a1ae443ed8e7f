"""metrics.jsonl: a line of JSON for every step and every evaluation of a run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megasink.atomic import atomic_text


class MetricsFile:
    """Appends records; a run that goes on drops those of the steps that it runs again.

    Args:
        path: of the file; None to write none.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._file: TextIO | None = None

    def open(self, iteration: int) -> list[dict[str, Any]]:
        """Open for the steps after an iteration; returns the records up to it."""
        if self._path is None:
            return []
        kept = []
        if self._path.is_file():
            for line in self._path.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError, RecursionError):  # cut by a kill
                    record = json.loads(line)
                    if record["iteration"] <= iteration:
                        kept.append(record)
            atomic_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a")
        return kept

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, for others to read at once.

        Raises:
            OSError: it is not written; with the name of the file, which the system does not give.
        """
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            # Closing would try once more to write what it holds back.
            with suppress(OSError):
                self._file.close()
            self._file = None
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Nothing is written afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None
