"""Atomic file and folder writes: complete or absent, however the process ends."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` once it is on disk.

    An exception in the body leaves nothing behind; a kill leaves NAME.partial, which the next call
    overwrites. Only one process at a time may write `path`.

    Raises:
        OSError: The file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # never write through a symlink
    try:
        with partial.open("xb") as file:
            yield file
            sync(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def atomic_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to `path` to write into, and rename it to `path` at the end.

    An exception in the body leaves nothing behind; a kill leaves .NAME.partial-PID, which is never
    loaded by mistake.

    Raises:
        OSError: `path` is not empty by then, or cannot be written.
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
    """Flush the contents of a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
