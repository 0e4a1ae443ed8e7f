"""Copies of a run's checkpoints in an object store: whole, or not named.

URL/run.json                  the id of the run that writes there
URL/config.json, ...          files of the run folder, as of the newest copy
URL/tokenizer/...
URL/checkpoints/iter_NNNNNNN/ files of a checkpoint
URL/whole/iter_NNNNNNN.json   their sizes and SHA-256, written after all of them
URL/checkpoints/latest_checkpointed_iteration.txt   for Megatron; not read here

A store has no rename: a checkpoint counts once its list stands in URL/whole, and what was
downloaded must match that list.
"""

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megasink.atomic import atomic_text
from megasink.checkpoint.intact import TRACKER, checkpoint_path
from megasink.checkpoint.tokenizer import OWN
from megasink.data import object_store
from megasink.errors import UserError
from megasink.json_file import read_object

ID = "checkpoint-store.json"
"""File of a run folder: the id of the run, as in run.json of its store."""
_LIST = re.compile(r"iter_(\d{7,18})\.json")
_OF_THE_RUN = ("starts.jsonl", "metrics.jsonl", "config.json")  # the last one makes it a run
_THREADS = 4  # of a store's client each has its own, for the parts of a large file


class Copy(NamedTuple):
    """A checkpoint in a store.

    Attributes:
        iteration: the step after which it was saved.
        time: when it was copied, in seconds since 1970.
        files: {name: (bytes, SHA-256)}.
        of_the_run: files of the run folder that are there too.
    """

    iteration: int
    time: float
    files: dict[str, tuple[int, str]]
    of_the_run: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(size for size, _ in self.files.values())


class CheckpointStore:
    """The copies of one run's checkpoints.

    Args:
        url: s3://BUCKET/KEY or msc://PROFILE/KEY; `url_problem` has checked it.

    Raises:
        UserError: by all methods, if the store refuses or does not answer, or if what is there is
            not of this form.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def owner(self) -> str | None:
        """Return the id of the run that writes there; None if none does."""
        return _text(self._object("run.json"), "id", self.url)

    def claim(self, run: Path, owner: str | None = None) -> None:
        """Make a run the one that writes there, and remember it in the run folder.

        Args:
            owner: the id that run.json has already; None writes it.
        """
        content = json.dumps({"id": owner or own_id(run) or secrets.token_hex(16)})
        atomic_text(run / ID, content)
        if owner is None:
            object_store.write(f"{self.url}/run.json", content.encode())

    def iterations(self) -> list[int]:
        """Return the iterations of the checkpoints that are whole, in ascending order."""
        found = map(_LIST.fullmatch, object_store.names(f"{self.url}/whole"))
        return sorted(int(name[1]) for name in found if name)

    def copy(self, iteration: int) -> Copy | None:
        """Return a checkpoint that is whole; None if it is not there."""
        found = self._object(f"whole/{_name(iteration)}.json")
        if found is None:
            return None
        try:
            listed = found["files"].items()
            files = {_plain(name): (int(size), str(digest)) for name, (size, digest) in listed}
            of_run = tuple(map(_plain_path, found["run"]))
            return Copy(iteration, float(found["time"]), files, of_run)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{self.url}/whole/{_name(iteration)}.json does not list a checkpoint: {error}"
            ) from error

    def upload(self, run: Path, checkpoints: Path, iteration: int) -> None:
        """Copy a checkpoint, and the small files of its run, unless the same one is there.

        Raises:
            OSError: a file cannot be read; FileNotFoundError if it was deleted meanwhile.
        """
        folder = checkpoint_path(checkpoints, iteration)
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        with ThreadPoolExecutor(_THREADS) as threads:
            facts = dict(zip((p.name for p in paths), _each(threads, _facts, paths), strict=True))
            before = self.copy(iteration)
            if before is not None and before.files == facts:
                return
            if before is not None:  # of a checkpoint that was damaged, and is trained again
                object_store.remove(f"{self.url}/whole/{_name(iteration)}.json")
            of_run = [run / name for name in _OF_THE_RUN if (run / name).is_file()]
            of_run += sorted(path for path in (run / OWN).glob("*") if path.is_file())
            names = [str(PurePosixPath(path.relative_to(run))) for path in of_run]
            there = f"{self.url}/checkpoints/{_name(iteration)}"
            pairs = [(path, f"{there}/{path.name}") for path in paths]
            pairs += [
                (path, f"{self.url}/{name}") for path, name in zip(of_run, names, strict=True)
            ]
            _each(threads, lambda pair: object_store.upload(*pair), pairs)
        content = {"iteration": iteration, "time": time.time(), "files": facts, "run": names}
        object_store.write(
            f"{self.url}/whole/{_name(iteration)}.json", json.dumps(content).encode()
        )
        newest = max(self.iterations(), default=iteration)
        object_store.write(f"{self.url}/checkpoints/{TRACKER}", str(newest).encode())

    def download_run(self, copy: Copy, folder: Path) -> None:
        """Write the run's files beside a checkpoint into a folder.

        Raises:
            OSError: the folder cannot be written.
        """
        for name in copy.of_the_run:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            object_store.download(f"{self.url}/{name}", path)

    def download(
        self, copy: Copy, checkpoints: Path, tell: Callable[[int], None] = lambda _: None
    ) -> None:
        """Write a checkpoint into a folder of checkpoints: whole, or not at all.

        Args:
            tell: receives the bytes of each file that has arrived.

        Raises:
            DamagedCopyError: a file is gone, or not the one that was copied.
            UserError: also if there is no space.
            OSError: the folder cannot be written.
        """
        checkpoints.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(checkpoints).free
        if copy.size > free:
            raise UserError(
                f"the checkpoint of step {copy.iteration} in {self.url} has {copy.size:,} bytes, "
                f"and {checkpoints} has {free:,} left: free some space"
            )
        partial = checkpoints / f".{_name(copy.iteration)}.arriving"
        shutil.rmtree(partial, ignore_errors=True)  # of a kill
        partial.mkdir()

        def one(name: str) -> None:
            url = f"{self.url}/checkpoints/{_name(copy.iteration)}/{name}"
            found = object_store.look(url)
            if found is None:
                raise DamagedCopyError(f"{url} is missing")
            if found.size == copy.files[name][0]:
                object_store.download(url, partial / name)
            if found.size != copy.files[name][0] or _facts(partial / name) != copy.files[name]:
                raise DamagedCopyError(f"{url} is damaged: it is not the file that was copied")
            tell(copy.files[name][0])

        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                _each(threads, one, copy.files)
            partial.replace(checkpoint_path(checkpoints, copy.iteration))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _object(self, name: str) -> dict[str, Any] | None:
        content = object_store.read(f"{self.url}/{name}")
        if content is None:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(content)
            if isinstance(value, dict):
                return value
        raise UserError(f"{self.url}/{name} is not a JSON object: give the URL of a run's copies")


class DamagedCopyError(UserError):
    """Raised if a checkpoint in a store is not what was copied there."""


def own_id(run: Path) -> str | None:
    """Return the id that a run has in its store; None before its first start with one.

    Raises:
        UserError: the file is damaged.
    """
    return _text(read_object(run / ID), "id", run / ID) if (run / ID).is_file() else None


def _text(found: dict[str, Any] | None, key: str, where: object) -> str | None:
    if found is None:
        return None
    value = found.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where} has no {key!r}: it is not of a run's copies")
    return value


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _facts(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"it names the file {name!r}")
    return name


def _plain_path(name: str) -> str:
    folder, _, last = str(name).rpartition("/")
    if name in _OF_THE_RUN or (folder == OWN and _plain(last)):
        return str(name)
    raise ValueError(f"it names the file {name!r}")


def _each[Item, Result](
    threads: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item]
) -> list[Result]:
    """Call a function for all items, and drop those left after the first error."""
    results: Iterator[Result] = threads.map(function, items)
    try:
        return list(results)
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        raise
