"""The folder of a command's results, written by one process at a time.

FOLDER/settings.json names the command and the settings of the results.
"""

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megasink.errors import Signalled, UserError
from megasink.files.atomic import atomic_folder, atomic_text, is_utf8
from megasink.files.json_file import read_object
from megasink.files.system_errors import writing

SETTINGS = "settings.json"
LOCK = ".lock"
# Files that a stopped command leaves, and continues from.
_MEASURED = ("partial", "points", "before", "run")
_PARTS = ("partial", "points", "iter_*", LOCK)
# Files that the system itself makes on a volume.
OF_SYSTEM = ("lost+found", ".snapshot", ".snapshots", ".Trash-*", ".DS_Store", ".nfs*")
_CURE = "choose another --output, or pass --overwrite"


@contextmanager
def results_in(
    folder: Path,
    command: str,
    settings: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    grows: Collection[str] = (),
    writes: bool = True,
) -> Iterator[Callable[[], None]]:
    """Hold the folder of a command's results while it measures and writes."""
    now = _as_json(settings)
    about = {"command": command, "settings": now, "given": _as_json(given or {})}

    def record() -> None:
        if writes:
            with writing(f"--output {folder}"):
                atomic_text(folder / SETTINGS, json.dumps(about, indent=1) + "\n")

    with exclusive(folder) if writes else nullcontext():
        if writes and not overwrite:
            _refuse(folder, command, {"settings": now}, grows)
        try:
            yield record
        except BaseException as error:
            if isinstance(error, Signalled) and any((folder / n).exists() for n in _MEASURED):
                error.kept = f"; to continue from {folder}, run the same command again"
            # Settings of nothing.
            if writes and {path.name for path in folder.iterdir()} == {SETTINGS, LOCK}:
                (folder / SETTINGS).unlink()
            raise


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Create a folder and lock it; if it is new and stays empty, it is deleted again."""
    made = not folder.exists()
    with writing(f"--output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder / LOCK, folder)
        lock.__enter__()
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
        if made:
            with suppress(OSError):  # it holds the results
                folder.rmdir()


@contextmanager
def locked(lock: Path, what: Path) -> Iterator[None]:
    """Lock a file, which is created and removed again; the kernel releases it."""
    # A non-empty file of that name is not ours: it is locked, and not changed.
    while True:
        # Do not block if the name is a pipe.
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another run is writing {what}: wait until it ends") from None
            except OSError:
                pass  # a file system without locks
            # The previous run may have removed the file between our open and lock.
            if lock.exists() and os.path.samestat(os.fstat(file), lock.stat()):
                try:
                    yield
                finally:
                    if lock.stat().st_size == 0:
                        lock.unlink()
                return
        finally:
            os.close(file)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add ``--overwrite``, as every command that writes results does."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace results made with other settings"
    )


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], grows: Collection[str] = ()
) -> list[str]:
    """Return "NAME OLD -> NEW" for each setting that differs; NAME.KEY in objects."""
    found: list[str] = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old == new or (name in grows and _holds(new, old)):
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            found += (f"{name}.{line}" for line in differences(old, new))
        else:
            found.append(f"{name} {_short(old)} -> {_short(new)}")
    return found


def foreign_contents(folder: Path) -> str | None:
    """Return the problem of a folder: foreign files, or a name that is not UTF-8."""
    if not is_utf8(folder):
        return f"--output {folder} is not UTF-8: {_CURE}"
    if not folder.is_dir() or (folder / SETTINGS).is_file():
        return None
    ours = (*_PARTS, *OF_SYSTEM)
    other = [path.name for path in sorted(folder.iterdir()) if not any(map(path.match, ours))]
    if not other:
        return None
    return f"--output {folder} contains {other[0]}, which is not a megasink result: {_CURE}"


def folder_problem(folder: Path) -> str | None:
    """Return why a folder, which may not exist yet, cannot be written."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        return f"cannot be created: {there} is a file"
    if not os.access(there, os.W_OK):
        return f"cannot be written: no permission to write to {there}"
    return None


def refuse_others(
    folder: Path, command: str, given: Mapping[str, Any], grows: Collection[str] = ()
) -> None:
    """Refuse a folder with results of another command line, before a model is loaded."""
    _refuse(folder, command, {"given": _as_json(given)}, grows)


def _as_json(settings: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(settings, default=str))


def _refuse(
    folder: Path, command: str, now: Mapping[str, Mapping[str, Any]], grows: Collection[str]
) -> None:
    """Raise UserError if a folder holds anything but results of these settings."""
    if problem := foreign_contents(folder):
        raise UserError(problem)
    if not (folder / SETTINGS).is_file():
        return
    saved = read_object(folder / SETTINGS)
    before = saved.get("settings")
    if saved.get("command") != command or not isinstance(before, dict):
        name = str(saved.get("command"))[:40]
        raise UserError(f"--output {folder} contains results of megasink {name}: {_CURE}")
    recorded = {key: old for key, old in saved.items() if isinstance(old, dict)}
    # Results of older versions did not record given flags.
    pairs = [(recorded.get(key) or wanted, wanted) for key, wanted in now.items()]
    if different := [line for pair in pairs for line in differences(*pair, grows)]:
        raise UserError(
            f"--output {folder} has results of other settings ({'; '.join(different)}): {_CURE}"
        )


def _holds(now: Any, before: Any) -> bool:
    """Return whether a setting still includes everything that it included before."""
    if isinstance(before, list) and isinstance(now, list):
        return all(entry in now for entry in before)
    return before is None


def _short(value: Any) -> str:
    text = str(value)
    if value is None or isinstance(value, list):
        text = " ".join(map(str, value or ())) or "not given"
    most = 12 if text.isalnum() and len(text) > 24 else 150  # of a hash the start
    return text if len(text) <= most else f"{text[:most]}..."


def refuse_contents(path: Path) -> None:
    """Raise UserError unless a folder is missing or empty."""
    if path.is_mount():
        raise UserError(f"{path} is the root of a file system: choose a folder inside it")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not empty: choose another folder or remove it")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Call `atomic_folder` for a folder that is missing or empty."""
    path = path.absolute()
    refuse_contents(path)
    with writing(path), atomic_folder(path) as partial:
        yield partial
