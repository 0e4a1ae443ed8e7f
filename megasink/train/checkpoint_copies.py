"""--checkpoint-store: finished checkpoints are copied to an object store while training goes on.

Megatron can save straight to a store, but a store that does not answer then ends the run. Here a
checkpoint is first saved to the run folder, as always, and a thread of rank 0 copies it: training
neither waits for a store nor depends on it.
"""

import shutil
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasink.checkpoint.find import newest_checkpoint
from megasink.checkpoint.intact import (
    NoneIntactError,
    checkpoint_path,
    damage,
    iterations,
    move_aside,
    newest_intact,
)
from megasink.checkpoint.saved import delete
from megasink.checkpoint.store import CheckpointStore, Copy, DamagedCopyError, own_id
from megasink.errors import Stopped, UserError
from megasink.json_file import read_object
from megasink.printable import say
from megasink.train.stop import Told

ARRIVING = ".arriving"
"""Folder in a run folder of files that are being downloaded."""
_LOOK_SECONDS = 2.0
_WAITS = (10.0, 30.0, 60.0, 300.0)  # seconds before the next attempt


def prepare(folder: Path, args: Namespace, differences: Any) -> None:
    """Claim the store for the run in a folder, and get a newer checkpoint from there on a resume.

    Call on the rank that owns the folder, before it looks for a checkpoint there.

    Args:
        differences: returns how a config.json differs from this start.

    Raises:
        UserError: the store refuses or does not answer, or holds the checkpoints of another run.
        OSError: the folder cannot be written.
    """
    store = CheckpointStore(args.checkpoint_store)
    owner, own, whole = store.owner(), own_id(folder), store.iterations()
    if owner is None or not whole:
        store.claim(folder)
        return
    is_new = not iterations(folder / "checkpoints")
    if not args.resume or (owner != own and not (args.resume == "auto" and is_new)):
        raise UserError(
            f"--checkpoint-store {store.url} holds the checkpoints of another run: give another "
            "URL, or go on with that run in a new folder (--resume auto)"
        )
    _fetch(store, whole, folder, differences, checksums=args.verify_checkpoint)
    store.claim(folder, owner)


def _fetch(
    store: CheckpointStore, whole: list[int], folder: Path, differences: Any, *, checksums: bool
) -> None:
    """Download the newest whole checkpoint if it is newer than the intact ones here."""
    checkpoints = folder / "checkpoints"
    try:
        here, damaged = newest_intact(checkpoints, checksums=checksums)
    except NoneIntactError as error:
        here, damaged = -1, error.damaged
    for iteration in reversed([there for there in whole if there > here]):
        copy = store.copy(iteration)
        if copy is None:  # another process has just removed it
            continue
        if iteration in damaged:
            move_aside(checkpoints, iteration, damaged.pop(iteration))
        if not (folder / "config.json").is_file():
            _fetch_run(store, copy, folder, differences)
        say(f"megasink: getting the checkpoint of step {iteration} from {store.url}")
        try:
            store.download(copy, checkpoints)
            return
        except DamagedCopyError as error:
            say(f"megasink: warning: {error}: looking for an older checkpoint")


def _fetch_run(store: CheckpointStore, copy: Copy, folder: Path, differences: Any) -> None:
    arriving = folder / ARRIVING
    shutil.rmtree(arriving, ignore_errors=True)  # of a kill
    store.download_run(copy, arriving)
    config = arriving / "config.json"
    if changed := differences(config, read_object(config)):
        raise UserError(
            f"--checkpoint-store {store.url} holds a run with another configuration "
            f"({'; '.join(changed)}): choose another URL or the same flags"
        )
    for path in arriving.iterdir():
        if path != config:
            path.rename(folder / path.name)
    config.rename(folder / config.name)
    arriving.rmdir()


class Copier:
    """Copies each finished checkpoint of a run, the newest first, in a thread.

    Args:
        run: the run folder.
        every: --save-retain-interval; what it does not keep is deleted here after it was copied.
        checksums: verify those of a checkpoint before it is copied, else sizes only.

    Attributes:
        copying: the iteration that is being copied, which must not be deleted.
        failed: why the last attempt failed, or None.
    """

    def __init__(self, store: CheckpointStore, run: Path, every: int | None, *, checksums: bool):
        self.copying: int | None = None
        self.failed: str | None = None
        self._store, self._run, self._every, self._checksums = store, run, every, checksums
        self._folder = run / "checkpoints"
        self._done = set(iterations(self._folder)) - {newest_checkpoint(self._folder)}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._copy_all, name="copies", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until all checkpoints are copied, or the last attempt has failed."""
        self._ending.set()
        while self._thread.is_alive():
            self._thread.join(1.0)  # a signal is handled meanwhile

    def left(self) -> list[int]:
        """Return the finished checkpoints that are not copied yet, newest first."""
        newest = newest_checkpoint(self._folder)
        found = iterations(self._folder) if newest is not None else []
        return [i for i in reversed(found) if i <= (newest or 0) and i not in self._done]

    def _copy_all(self) -> None:
        failures = 0
        while True:
            is_last = self._ending.is_set()
            for iteration in self.left()[:1]:
                self._copy(iteration)
                failures = failures + 1 if self.failed else 0
            if self._ending.is_set() and (not self.left() or (self.failed and is_last)):
                return
            if self.failed:
                self._ending.wait(_WAITS[min(failures, len(_WAITS)) - 1])
            elif not self.left():
                self._ending.wait(_LOOK_SECONDS)

    def _copy(self, iteration: int) -> None:
        self.copying = iteration
        path = checkpoint_path(self._folder, iteration)
        try:
            if problem := damage(path, checksums=self._checksums):
                if path.is_dir():
                    say(f"megasink: warning: step {iteration} is not copied: {problem}")
                self._done.add(iteration)
                return
            self._store.upload(self._run, self._folder, iteration)
            self._done.add(iteration)
            self.failed = None
            say(f"megasink: the checkpoint of step {iteration} is in {self._store.url}")
        except Exception as error:  # a library's bug must not end the copies without a word
            self.failed = None
            if not path.is_dir():  # deleted before `copying` said so
                return
            why = str(error) if isinstance(error, UserError | OSError) else type(error).__name__
            self.failed = f"the checkpoint of step {iteration} is not in {self._store.url}: {why}"
            say(f"megasink: warning: {self.failed}; training goes on, and it is tried again")
        finally:
            self.copying = None
        self._delete_unless_kept(iteration)

    def _delete_unless_kept(self, iteration: int) -> None:
        """Delete what Megatron left to us while we copied it."""
        newest = newest_checkpoint(self._folder)
        if self.failed or not self._every or newest is None or iteration >= newest:
            return
        if iteration % self._every and damage(checkpoint_path(self._folder, newest)) is None:
            try:
                delete(checkpoint_path(self._folder, iteration))
            except OSError as error:  # the run does not depend on it
                say(f"megasink: the checkpoint of step {iteration} cannot be deleted ({error})")


_copier: Copier | None = None


def is_being_copied(iteration: int) -> bool:
    """Whether a checkpoint must not be deleted yet: the copier does that."""
    return _copier is not None and _copier.copying == iteration


@contextmanager
def copying_checkpoints(args: Namespace) -> Iterator[None]:
    """Copy the run's checkpoints while the block runs, and the last one before it ends.

    Raises:
        UserError: training ended well, but a checkpoint could not be copied.
    """
    global _copier
    if args.rank or not args.checkpoint_store:
        yield
        return
    store = CheckpointStore(args.checkpoint_store)
    run, every = Path(args.run_dir), args.save_retain_interval
    _copier = Copier(store, run, every, checksums=args.verify_checkpoint)
    try:
        yield
    except (Stopped, SystemExit):  # after a checkpoint; other errors end the rank without waiting
        _wait(_copier)
        raise
    else:
        _wait(_copier)
        if _copier.left():
            raise UserError(
                f"the run is saved in {run}, but {_copier.failed} (run the command again with "
                "--resume auto to copy it)"
            )
    finally:
        _copier = None


def _wait(copier: Copier) -> None:
    # From now on a signal ends this rank at once: what is here is saved.
    Told.saves, Told.phase = False, "copying a checkpoint to its store"
    copier.end()
