"""Atomic file and folder writes: complete or absent, however the process ends."""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL: set[Path] = set()
"""Folders that this process is writing; removed if a signal ends the process (signals.py)."""
_FILES = ".files"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` once it is on disk; one process at a time."""
    # An exception leaves nothing behind; a kill leaves NAME.partial, which the next call
    # overwrites.
    partial = path.with_name(f"{path.name}.partial")
    with _naming(path):
        partial.unlink(missing_ok=True)  # never write through a symlink
        try:
            with partial.open("xb") as file:
                yield file
                sync(file)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def atomic_text(path: Path, text: str) -> None:
    """Write a text file atomically; file names in it need not be UTF-8."""
    with atomic_file(path) as file:
        file.write(text.encode(errors="backslashreplace"))


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a folder next to `path` to write into, and rename it to `path` at the end.

    An exception in the body leaves nothing behind, nor does a signal; a kill leaves
    .NAME.partial-PID, which is never loaded by mistake, and which the next call for `path` removes.
    """
    with _naming(path), _partial(path) as partial:
        yield partial
        sync_folder(partial)
        partial.replace(path)
        sync_folder(path.parent)


@contextmanager
def atomic_files(folder: Path, replaced: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a folder for new files, which replace those in `folder` once all are written."""
    # An exception in the body leaves `folder` as it was; see `atomic_folder` for signals and kills.
    # Files that match `replaced` and are not written again are removed.
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        with _naming(folder), _partial(folder / _FILES) as partial:
            yield partial
            files = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
            for old in {old for pattern in replaced for old in folder.glob(pattern)}:
                if old.relative_to(folder) not in files:
                    old.unlink()
                    with suppress(OSError):  # it holds others
                        old.parent.rmdir()
            for name in sorted(files, key=lambda name: (name.suffix == ".json", name)):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).replace(folder / name)
    except BaseException:
        for each in made:
            with suppress(OSError):  # it has files of others
                each.rmdir()
        raise


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Make and lock .NAME.partial-PID beside `path`, and remove it at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removeprefix(".")
    remove_dead(path.parent.glob(f".{glob.escape(name)}.partial-*"))
    partial = path.with_name(f".{name}.partial-{os.getpid()}")
    PARTIAL.add(partial)
    lock = None
    try:  # before anything exists: a signal may come anywhere
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        lock_folder(lock)
        yield partial
    finally:
        if lock is not None:
            os.close(lock)  # first: without free file descriptors, removing needs it
        remove(partial)
        PARTIAL.discard(partial)


def remove(folder: Path) -> None:
    """Remove a folder, also with a single free file descriptor; ignore what cannot be removed."""
    shutil.rmtree(folder, ignore_errors=True)  # it needs one for each level
    for place, _, files in folder.walk(top_down=False):
        with suppress(OSError):
            for name in files:
                (place / name).unlink()
            place.rmdir()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add `path` to a system error without a file name, such as a write error."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def lock_folder(descriptor: int) -> bool:
    """Lock a folder while this process and its forks live; return False if it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # locked, or a file system without locks
    return True


def remove_dead(folders: Iterable[Path]) -> None:
    """Remove unlocked folders left by this user's killed processes."""
    for folder in folders:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and lock_folder(descriptor):
                    remove(folder)
            finally:
                os.close(descriptor)


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


def is_utf8(path: object) -> bool:
    """Whether the name of a file is UTF-8, as torch and tokenizers expect; Linux does not."""
    return not any("\ud800" <= character <= "\udfff" for character in str(path))
