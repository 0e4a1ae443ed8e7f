"""Write and follow metrics.jsonl: one line of JSON for every step and evaluation of a run."""

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megasink.files.atomic import atomic_text
from megasink.files.json_file import objects_in, open_file, read_text

RATIO = "balance_gradient_ratio"
ACTS = 1e-3
"""Lowest mean `RATIO` at which the head-balance loss had a visible effect (replicate, f)."""


class MetricsFile:
    """Append records, if given a path; a resumed run drops those of repeated steps."""

    def __init__(self, path: Path | None):
        self._path = path
        self._file: TextIO | None = None

    def open(self, iteration: int) -> list[dict[str, Any]]:
        """Open the file for steps after an iteration, and return the records up to it."""
        if self._path is None:
            return []
        kept = []
        if self._path.exists():
            kept = [record for record in _records(self._path) if record["iteration"] <= iteration]
            atomic_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a")
        return kept

    def write(self, record: dict[str, Any]) -> None:
        """Append a record and flush it."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            # Closing would retry the buffered data.
            with suppress(OSError):
                self._file.close()
            self._file = None
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file; later records are ignored."""
        if self._file is not None:
            self._file.close()
            self._file = None


class NewLines:
    """Read the records appended to a JSON-lines file since the last call, at first none."""

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
        with open_file(self._path) as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        return list(objects_in(lines.splitlines()))


def weak_loss(path: Path, coefficient: float) -> str | None:
    """Return a sentence if the head-balance loss of a run had almost no effect; else None."""
    ratios = [record.get(RATIO) for record in _records(path)] if path.exists() else []
    there = [ratio for ratio in ratios if ratio]  # none or 0: skipped, or without coefficients yet
    if not coefficient or not there or (mean := statistics.fmean(there)) >= ACTS:
        return None
    enough = 10.0 ** math.ceil(math.log10(coefficient * 10 * ACTS / mean))
    return (
        f"the head-balance loss had almost no effect: at --head-balance-coeff {coefficient:g} "
        f"its gradient was on average {mean:.1e} times the rest of the gradient. At "
        f"--head-balance-coeff {enough:g} it would be about {mean * enough / coefficient:.1g} times"
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Return the records with a step, without lines that a kill truncated."""
    records = objects_in(read_text(path, errors="replace").splitlines())
    return (record for record in records if isinstance(record.get("iteration"), int))
