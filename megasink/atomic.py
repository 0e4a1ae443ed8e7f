"""Files and folders that are there whole or not at all, whatever ends the process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when it has reached the disk.

    Whatever ends the body early leaves nothing; a kill leaves NAME.partial, which the next call
    writes anew. One process at a time may write `path`.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # and never through a link of that name
    try:
        with partial.open("xb") as file:
            yield file
            sync(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def atomic_text(path: Path, text: str) -> None:
    """Write a whole text file.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write into, renamed to `path` at the end.

    Whatever ends the body early leaves nothing; a kill leaves .NAME.partial-PID, which nothing
    loads by mistake.

    Raises:
        OSError: `path` holds something then, or cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(file: BinaryIO) -> None:
    """Let the bytes of a file reach the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Let the names in a folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
