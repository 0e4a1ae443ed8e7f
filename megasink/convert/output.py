"""The output folder of a conversion: complete or absent."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megasink.atomic import atomic_folder
from megasink.errors import UserError


def refuse_contents(path: Path) -> None:
    """Raise UserError unless a folder is missing or empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder or remove it")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Like `megasink.atomic.atomic_folder`, for a folder that is missing or empty.

    Raises:
        UserError: `path` is not empty, or cannot be written.
    """
    path = path.absolute()
    refuse_contents(path)
    try:
        with atomic_folder(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
