"""A folder that is there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megasink.errors import UserError


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Write into a folder beside `path`, and rename it to `path` at the end.

    Whatever ends the body early leaves nothing; a kill leaves ".NAME.partial-PID", which nothing
    loads by mistake and the next call may delete.

    Yields:
        the folder to write into.

    Raises:
        UserError: `path` holds something already, or cannot be written.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder, or remove it")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    try:
        yield partial
        sync_folder(partial)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Let the names in a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
