"""The output folder of a conversion: complete or absent."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megasink.errors import UserError
from megasink.files.atomic import atomic_folder
from megasink.files.system_errors import writing


def refuse_contents(path: Path) -> None:
    """Raise UserError unless a folder is missing or empty."""
    if path.is_mount():
        raise UserError(f"{path} is the root of a file system: choose a folder inside it")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder or remove it")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Call `megasink.files.atomic.atomic_folder` for a folder that is missing or empty."""
    path = path.absolute()
    refuse_contents(path)
    with writing(path), atomic_folder(path) as partial:
        yield partial


def parse_size(text: str) -> int:
    """Return the bytes in "5GB", "500MB" or a plain number."""
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
    number, unit = text[:-2], units.get(text[-2:].upper())
    try:
        size = int(float(number) * unit if unit else float(text))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UserError(f"--shard-size {text}: use a size such as 5GB or 500MB")
    return size
