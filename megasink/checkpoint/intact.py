"""Check checkpoints for damage, and resume from the newest intact one.

A kill during a save, a full disk or a bad copy leaves a folder that looks like a checkpoint. The
index lists the bytes each file must hold, and each stored tensor has a CRC-32, so verification
needs no extra files.
"""

import io
import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megasink.atomic import atomic_text
from megasink.checkpoint.torch_metadata import read_metadata
from megasink.errors import UserError
from megasink.printable import say

_ITERATION = re.compile(r"iter_(\d+)")
TRACKER = "latest_checkpointed_iteration.txt"


def iterations(folder: Path) -> list[int]:
    """Return the iterations with a checkpoint folder, intact or not, in ascending order."""
    names = (_ITERATION.fullmatch(path.name) for path in folder.glob("iter_*"))
    return sorted(int(name[1]) for name in names if name)


def checkpoint_path(folder: Path, iteration: int) -> Path:
    """Return the folder in which Megatron stores the checkpoint of an iteration."""
    return folder / f"iter_{iteration:07d}"


def damage(checkpoint: Path, *, checksums: bool = False) -> str | None:
    """Describe the damage to a torch_dist checkpoint; None if it is intact.

    Args:
        checkpoint: an iter_NNNNNNN folder.
        checksums: verify checksums in addition to file sizes. Takes about as long as reading the
            files.
    """
    try:
        json.loads((checkpoint / "metadata.json").read_text())
    except (OSError, ValueError, RecursionError):
        return "it was not finished (metadata.json is missing or broken)"
    try:
        entries = list(read_metadata(checkpoint).storage_data.values())
    except UserError as error:
        return f".metadata is missing or broken ({error})"
    needed: dict[str, int] = {}
    for entry in entries:
        end = entry.offset + entry.length
        needed[entry.relative_path] = max(end, needed.get(entry.relative_path, 0))
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size < size:
            return f"{name} has {path.stat().st_size} of {size} bytes"
    return _wrong_checksum(checkpoint, entries) if checksums else None


def _wrong_checksum(checkpoint: Path, entries: list[Any]) -> str | None:
    def check(entry: Any) -> str | None:
        with (checkpoint / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            content = file.read(entry.length)
        where = f"{entry.relative_path} is damaged at byte {entry.offset} or after it"
        try:
            bad = zipfile.ZipFile(io.BytesIO(content)).testzip()
        except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError):
            return where
        return None if bad is None else where

    with ThreadPoolExecutor() as threads:
        return next((found for found in threads.map(check, entries) if found), None)


def newest_intact(folder: Path, *, checksums: bool = False) -> tuple[int, dict[int, str]]:
    """Return the newest intact checkpoint, and the damage to each newer one.

    Raises:
        UserError: no checkpoint is intact.
    """
    iteration, damaged = _search(folder, checksums)
    if iteration is None:
        raise _none_is_whole(folder, damaged)
    return iteration, damaged


def _search(folder: Path, checksums: bool) -> tuple[int | None, dict[int, str]]:
    damaged: dict[int, str] = {}
    for iteration in reversed(iterations(folder)):
        problem = damage(checkpoint_path(folder, iteration), checksums=checksums)
        if problem is None:
            return iteration, damaged
        damaged[iteration] = problem
    return None, damaged


def _none_is_whole(folder: Path, damaged: dict[int, str]) -> UserError:
    then = "--resume auto starts at step 0"
    if not damaged:
        return UserError(f"--resume: {folder} holds no checkpoint: {then}")
    listed = "; ".join(f"step {iteration}: {problem}" for iteration, problem in damaged.items())
    return UserError(f"--resume: no checkpoint in {folder} is whole ({listed}): {then}")


def go_back_to_intact(
    folder: Path, *, checksums: bool = False, or_start: bool = False
) -> int | None:
    """Make Megatron load the newest intact checkpoint. Call on one rank only.

    Newer, damaged checkpoints are reported and renamed to iter_NNNNNNN.damaged, so training does
    not overwrite them.

    Args:
        folder: the checkpoint folder.
        checksums: see `damage`.
        or_start: if no checkpoint is intact, leave none for Megatron to load.

    Returns:
        the iteration; None if no checkpoint is intact.

    Raises:
        UserError: no checkpoint is intact, and `or_start` is False.
    """
    iteration, damaged = _search(folder, checksums)
    if iteration is None and not or_start:
        raise _none_is_whole(folder, damaged)
    for number, problem in damaged.items():
        path = checkpoint_path(folder, number)
        aside = path.with_name(f"{path.name}.damaged")
        count = 1
        while aside.exists():
            count += 1
            aside = path.with_name(f"{path.name}.damaged{count}")
        path.rename(aside)
        say(f"megasink: the checkpoint of step {number} is damaged ({problem}): moved to {aside}")
    if iteration is None:
        say(f"megasink: no whole checkpoint in {folder}: starting at step 0")
        (folder / TRACKER).unlink(missing_ok=True)
        return None
    if damaged or or_start:
        print(f"megasink: going on from step {iteration}", flush=True)
    atomic_text(folder / TRACKER, str(iteration))
    return iteration
