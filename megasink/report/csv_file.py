"""Tables as CSV files that a spreadsheet takes for text and numbers, and for no formulas."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.printable import printable

# What a spreadsheet takes for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under their columns; numbers as they are, text by :func:`text_cell`.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writerow({name: text_cell(name) for name in columns})
        for row in rows:
            writer.writerow({name: text_cell(value) for name, value in row.items()})


def text_cell(value: Any) -> Any:
    """A text with an apostrophe before what would be a formula, and without control characters."""
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(_FORMULA) + printable(value, keep="")
