"""Check checkpoints for damage, and resume from the newest intact one.

The index lists the bytes of each file, and each stored tensor has a CRC-32.
"""

import io
import re
import shutil
import zipfile
from collections.abc import Buffer, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megasink.checkpoints.torch_metadata import read_metadata
from megasink.console.printable import say
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object

_ITERATION = re.compile(r"iter_(\d+)")
_ASIDE = re.compile(r"iter_\d+\.damaged\d*")
_KEPT_ASIDE = 2
_FORMATS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
TRACKER = "latest_checkpointed_iteration.txt"


def iterations(folder: Path) -> list[int]:
    """Return the iterations with a checkpoint folder, intact or not, in ascending order."""
    names = (_ITERATION.fullmatch(path.name) for path in folder.glob("iter_*"))
    return sorted(int(name[1]) for name in names if name)


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the folder in which Megatron stores the checkpoint of an iteration."""
    return folder / f"iter_{iteration:07d}"


def damage(
    checkpoint: Path,
    *,
    checksums: bool = False,
    quick: bool = False,
    tell: Callable[[int], None] = lambda _: None,
) -> str | None:
    """Describe the damage to a torch_dist checkpoint; None if it is intact."""
    common = checkpoint / "common.pt"
    if common.exists() and not (common.is_file() and zipfile.is_zipfile(common)):
        return "common.pt is broken"
    try:
        formats = read_object(checkpoint / "metadata.json")
        if {key: formats.get(key) for key in _FORMATS} != _FORMATS:
            raise UserError(f"metadata.json lists formats other than {_FORMATS}")
    except UserError:
        link = _link_of(checkpoint / "metadata.json")
        return f"it is unfinished (metadata.json is missing or broken{link})"
    try:
        entries = list(read_metadata(checkpoint, quick=quick).storage_data.values())
    except UserError as error:
        return f".metadata is missing or broken ({error})"
    needed: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing{_link_of(path)}"
        if path.stat().st_size < size:
            return f"{name} has only {path.stat().st_size} of {size} bytes"
    return _wrong_checksum(checkpoint, entries, tell) if checksums else None


def _link_of(path: Path) -> str:
    """Return the target of a link, such as those of megasink adopt, to complete a message."""
    return f": it links to {path.readlink()}" if path.is_symlink() else ""


def refuse_damage(checkpoint: Path) -> None:
    """Refuse a checkpoint that is damaged, by the sizes of its files."""
    if problem := damage(checkpoint):
        raise UserError(f"{checkpoint} is damaged: {problem}; choose another with --iteration")


def _wrong_checksum(
    checkpoint: Path, entries: list[Any], tell: Callable[[int], None]
) -> str | None:
    def check(entry: Any) -> str | None:
        where = f"{entry.relative_path} is damaged at or after byte {entry.offset}"
        try:
            with (checkpoint / entry.relative_path).open("rb", buffering=0) as file:
                stored = io.BufferedReader(Part(file, entry.offset, entry.length))
                bad = zipfile.ZipFile(stored).testzip()
        except OSError as error:
            return f"{entry.relative_path} cannot be read ({error.strerror or error})"
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError):
            return where
        return None if bad is None else where

    with ThreadPoolExecutor() as threads:
        try:
            for entry, problem in zip(entries, threads.map(check, entries), strict=True):
                if problem is not None:
                    return problem
                tell(entry.length)
        finally:
            threads.shutdown(cancel_futures=True)
    return None


class Part(io.RawIOBase):
    """A stored tensor as a file of its own: a tensor may be larger than the free memory."""

    def __init__(self, file: io.RawIOBase | io.FileIO, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} is before the start of the file")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        wanted = memoryview(buffer).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(wanted) or 0
        self._at += read
        return read


def move_aside(folder: Path, iteration: int, problem: str) -> None:
    """Rename a damaged checkpoint to iter_NNNNNNN.damaged, and report it."""
    path = checkpoint_path(folder, iteration)
    aside = path.with_name(f"{path.name}.damaged")
    count = 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"{path.name}.damaged{count}")
    path.rename(aside)
    say(f"megasink: the checkpoint of step {iteration} is damaged ({problem}): moved to {aside}")
    ours = [p for p in folder.iterdir() if _ASIDE.fullmatch(p.name) and not p.is_symlink()]
    # A rename sets this time.
    for old in sorted(ours, key=lambda p: p.stat().st_ctime_ns)[:-_KEPT_ASIDE]:
        shutil.rmtree(old, ignore_errors=True)
        say(f"megasink: deleted {old}: the newest {_KEPT_ASIDE} damaged checkpoints are kept")


def newest_intact(
    folder: Path, *, checksums: bool = False, quick: bool = False
) -> tuple[int, dict[int, str]]:
    """Return the newest intact checkpoint, and the damage to each newer one; see `damage`."""
    damaged: dict[int, str] = {}
    for iteration in reversed(iterations(folder)):
        problem = damage(checkpoint_path(folder, iteration), checksums=checksums, quick=quick)
        if problem is None:
            return iteration, damaged
        damaged[iteration] = problem
    raise NoneIntactError(folder, damaged)


class NoneIntactError(UserError):
    """Raised if a folder has no intact checkpoint; `damaged` describes the damage to each."""

    def __init__(self, folder: Path, damaged: dict[int, str]):
        self.damaged = damaged
        listed = "; ".join(f"step {iteration}: {problem}" for iteration, problem in damaged.items())
        what = f"no checkpoint in {folder} is intact ({listed})"
        what = what if damaged else f"{folder} has no checkpoint"
        super().__init__(f"--resume: {what}: use --resume auto to start at step 0")


def go_back_to_intact(
    folder: Path, *, checksums: bool = False, or_start: bool = False
) -> int | None:
    """Make Megatron load the newest intact checkpoint, on one rank; rename damaged newer ones."""
    iteration: int | None = None
    try:
        iteration, damaged = newest_intact(folder, checksums=checksums)
    except NoneIntactError as error:
        if not or_start:
            raise
        damaged = error.damaged
    for number, problem in damaged.items():
        move_aside(folder, number, problem)
    if iteration is None:
        say(f"megasink: no intact checkpoint in {folder}: starting at step 0")
        (folder / TRACKER).unlink(missing_ok=True)
        return None
    if damaged or or_start:
        print(f"megasink: continuing from step {iteration}", flush=True)
    atomic_text(folder / TRACKER, str(iteration))
    return iteration
