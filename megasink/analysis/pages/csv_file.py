"""CSV files that spreadsheets read as text and numbers, never as formulas."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.console.printable import printable

# Prefixes that spreadsheets read as the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under their columns; numbers unchanged, text through :func:`text_cell`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writerow({name: text_cell(name) for name in columns})
        for row in rows:
            writer.writerow({name: text_cell(value) for name, value in row.items()})


def text_cell(value: Any) -> Any:
    """Return text without control characters, with an apostrophe before a would-be formula."""
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(_FORMULA) + printable(value, keep="")
