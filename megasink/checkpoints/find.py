"""Find the checkpoint of a folder and its weights, or all checkpoints of a run."""

import errno
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megasink.checkpoints.damage import TRACKER, checkpoint_path, damage, iterations, refuse_damage
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.data.dataset_files import is_stored
from megasink.errors import UserError
from megasink.files.json_file import read_object, read_text


class Checkpoint(NamedTuple):
    """A finished checkpoint of a run; `folder` has the .distcp files of one iteration."""

    config: Path
    folder: Path
    iteration: int


def is_legacy(folder: Path) -> bool:
    """Return whether an iter_NNNNNNN folder has Megatron's old format, a pickle for each rank."""
    return not (folder / ".metadata").is_file() and any(folder.glob("mp_rank_*"))


class ForeignCheckpointError(UserError):
    """Raised for a checkpoint without a run's config.json."""

    def __init__(self, path: Path):
        super().__init__(f"{path} {_adopting(path)}")


def _adopting(path: Path) -> str:
    return (
        "is not a megasink run (no config.json): turn a Megatron-LM or Megatron-Bridge checkpoint "
        f"into a run with megasink adopt {path} RUN"
    )


def find_checkpoint(path: Path, iteration: int | None = None) -> Checkpoint:
    """Resolve a run, checkpoint or iteration folder to a checkpoint."""
    if is_stored(path):
        raise UserError(
            f"{path} is in an object store: copy it to a folder first (aws s3 sync, rclone copy)"
        )
    if not path.is_dir():
        raise UserError(f"{path} does not exist: give a run folder or its checkpoint folder")
    given = path
    named = re.fullmatch(r"iter_(\d{7,})", path.resolve().name)
    if named:
        if iteration not in (None, int(named[1])):
            raise UserError(f"{path} is not the checkpoint of iteration {iteration}: give the run")
        iteration, path = int(named[1]), path.resolve().parent
    run, checkpoints = path, path / "checkpoints"
    if not (path / "config.json").is_file() and not checkpoints.is_dir():
        run, checkpoints = path.resolve().parent, path
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        if not (run / "config.json").is_file() and any(checkpoints.glob("iter_*/.metadata")):
            raise ForeignCheckpointError(given)
        if (path / "config.json").is_file() and not is_run(path):
            raise UserError(
                f"{path} is a Hugging Face folder, not a run: import it with megasink "
                f"convert-from-hf {path} --output RUN"
            )
        if runs := runs_in(path):
            raise UserError(f"{path} {runs}")
        raise UserError(f"{path} has no finished checkpoint ({TRACKER} is missing)")
    if not (run / "config.json").is_file():
        raise ForeignCheckpointError(given)
    iteration = newest if iteration is None else iteration
    folder = checkpoint_path(checkpoints, iteration)
    if not folder.is_dir():
        text = ", ".join(map(str, iterations(checkpoints))) or "none"
        raise UserError(f"{checkpoints} has no checkpoint of iteration {iteration}; it has {text}")
    return Checkpoint(run / "config.json", folder, iteration)


def runs_in(folder: Path, file: str = f"checkpoints/{TRACKER}", what: str = "runs") -> str | None:
    """Return a clause that names the runs in a folder, or how to adopt a checkpoint there."""
    near = (folder, folder.resolve().parent)
    of_run = any((one / "config.json").is_file() for one in near)
    if not of_run and any(folder.glob("iter_*/.metadata")):
        return _adopting(folder)
    depth = len(folder.parts) + 1
    runs = [str(Path(*path.parts[:depth])) for path in sorted(folder.glob(f"*/{file}"))]
    more = f" ({len(runs) - 5} more)" if len(runs) > 5 else ""
    return f"is a folder of {what}: choose {' or '.join(runs[:5])}{more}" if runs else None


def is_run(path: Path) -> bool:
    """Return whether a folder is a run of megasink; refuse a foreign checkpoint."""
    config = path / "config.json"
    if config.is_file():
        return "arguments" in read_object(config)
    try:
        return bool(find_checkpoint(path))
    except ForeignCheckpointError:
        raise
    except UserError:
        return False


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {key: shape} of the weights in a torch_dist checkpoint, without optimizer states."""
    entries = read_metadata(folder).state_dict_metadata
    refuse_damage(folder)
    tensors = {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
    return {key: size for key, size in tensors.items() if not key.startswith("optimizer.")}


def newest_checkpoint(folder: Path) -> int | None:
    """Return the iteration of the newest finished checkpoint in a folder, or None."""
    try:
        text = read_text(folder / TRACKER, 64).strip()
    except UserError:
        return None
    return int(text) if text.isdecimal() and len(text) < 20 else None


_DELETED = ".deleted"
_ASIDE = re.compile(r"iter_(\d+)\.(damaged\d*|deleted)")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: bytes of its files, time of the last one (s since 1970), damage."""

    iteration: int
    folder: Path
    size: int
    time: float
    problem: str | None

    @property
    def is_aside(self) -> bool:
        """Whether it was renamed so that nothing loads it."""
        return bool(self.folder.suffix)


def saved_checkpoints(
    folder: Path, *, checksums: bool = False, tell: Callable[[Path, int], None] = lambda *_: None
) -> list[Saved]:
    """Return the checkpoints in a folder in ascending order, damaged and half-deleted ones too."""
    checkpoints = []
    for iteration in iterations(folder):
        path = checkpoint_path(folder, iteration)
        problem = damage(path, checksums=checksums, tell=lambda size, p=path: tell(p, size))  # type: ignore[misc]
        checkpoints.append(_saved(iteration, path, problem))
    for path in folder.glob("iter_*.d*"):
        if match := _ASIDE.fullmatch(path.name):
            half = path.suffix == _DELETED
            why = "its deletion was interrupted" if half else "a resume moved it aside"
            checkpoints.append(_saved(int(match[1]), path, why))
    return sorted(checkpoints, key=lambda saved: (saved.iteration, saved.folder.name))


def _saved(iteration: int, path: Path, problem: str | None) -> Saved:
    size, last = 0, 0.0
    for file in path.glob("*"):
        with suppress(OSError):  # another process deletes it
            facts = file.stat()
            size, last = size + facts.st_size, max(last, facts.st_mtime)
    return Saved(iteration, path, size, last, problem)


def delete(folder: Path) -> bool:
    """Delete a checkpoint, renamed first; False if another process has."""
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
