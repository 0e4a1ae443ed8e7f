"""The checkpoints of a run: what is there, and removing one."""

import errno
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasink.checkpoints.intact import checkpoint_path, damage, iterations

_DELETED = ".deleted"
_ASIDE = re.compile(r"iter_(\d+)\.(damaged\d*|deleted)")


@dataclass(frozen=True)
class Saved:
    """A folder of a checkpoint.

    Attributes:
        iteration: the step after which it was saved.
        folder: its path.
        size: bytes of its files.
        time: of its last file, in seconds since 1970.
        problem: its damage; None if it is intact.
    """

    iteration: int
    folder: Path
    size: int
    time: float
    problem: str | None

    @property
    def is_aside(self) -> bool:
        """Whether it was renamed, so that nothing loads it."""
        return bool(self.folder.suffix)


def saved_checkpoints(
    folder: Path,
    *,
    checksums: bool = False,
    tell: Callable[[Path, int], None] = lambda *_: None,
) -> list[Saved]:
    """Return the checkpoints in a folder in ascending order, damaged and half-deleted ones too.

    Args:
        checksums: verify checksums in addition to file sizes.
        tell: receives a checkpoint and the bytes of each of its tensors that are verified.
    """
    found = []
    for iteration in iterations(folder):
        path = checkpoint_path(folder, iteration)
        problem = damage(path, checksums=checksums, tell=lambda size, p=path: tell(p, size))  # type: ignore[misc]
        found.append(_saved(iteration, path, problem))
    for path in folder.glob("iter_*.d*"):
        if match := _ASIDE.fullmatch(path.name):
            half = path.suffix == _DELETED
            why = "its deletion was interrupted" if half else "it was moved aside on a resume"
            found.append(_saved(int(match[1]), path, why))
    return sorted(found, key=lambda saved: (saved.iteration, saved.folder.name))


def _saved(iteration: int, path: Path, problem: str | None) -> Saved:
    size, last = 0, 0.0
    for file in path.glob("*"):
        with suppress(OSError):  # another process deletes it
            facts = file.stat()
            size, last = size + facts.st_size, max(last, facts.st_mtime)
    return Saved(iteration, path, size, last, problem)


def delete(folder: Path) -> bool:
    """Delete a checkpoint; False if another process has.

    It is renamed first, so that a kill leaves nothing that looks like a checkpoint.

    Raises:
        OSError: it cannot be deleted.
    """
    if folder.suffix != _DELETED:
        doomed = folder.with_name(folder.name + _DELETED)
        try:
            folder = folder.rename(doomed)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _remove(doomed)  # of an earlier checkpoint of this step
            folder = folder.rename(doomed)
    _remove(folder)
    return True


def _remove(folder: Path) -> None:
    def failed(function: object, path: str, error: BaseException) -> None:
        if not isinstance(error, FileNotFoundError):  # another process deletes it too
            raise error

    shutil.rmtree(folder, onexc=failed)
