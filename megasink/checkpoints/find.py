"""Resolve a folder to a checkpoint, and list the weights in it."""

import contextlib
import re
from pathlib import Path
from typing import NamedTuple

from megasink.checkpoints.intact import TRACKER, checkpoint_path, iterations, refuse_damage
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.data.object_store import is_stored
from megasink.errors import UserError
from megasink.json_file import read_object


class Checkpoint(NamedTuple):
    """A finished checkpoint of a run.

    Attributes:
        config: the run's config.json.
        folder: the .distcp files of one iteration.
        iteration: the step after which the checkpoint was saved.
    """

    config: Path
    folder: Path
    iteration: int


def is_legacy(folder: Path) -> bool:
    """Whether an iter_NNNNNNN folder has Megatron's old format, a pickle for each rank."""
    return not (folder / ".metadata").is_file() and any(folder.glob("mp_rank_*"))


def find_checkpoint(path: Path, iteration: int | None = None) -> Checkpoint:
    """Resolve a run, checkpoint or iteration folder to a checkpoint.

    Raises:
        UserError: no such folder, no finished checkpoint in it, or not that iteration.
    """
    if is_stored(path):
        raise UserError(
            f"{path} is in an object store: copy it to a folder, as with aws s3 sync or rclone copy"
        )
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run folder or its checkpoint folder")
    named = re.fullmatch(r"iter_(\d{7,})", path.resolve().name)
    if named:
        if iteration not in (None, int(named[1])):
            raise UserError(f"{path} is not the checkpoint of iteration {iteration}")
        iteration, path = int(named[1]), path.resolve().parent
    run, checkpoints = path, path / "checkpoints"
    if not (path / "config.json").is_file() and not checkpoints.is_dir():
        run, checkpoints = path.resolve().parent, path
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        if (path / "config.json").is_file() and not is_run(path):
            raise UserError(
                f"{path} is a Hugging Face folder, not a run; megasink convert-from-hf {path} RUN "
                "makes a run of it"
            )
        raise UserError(f"{path}: no finished checkpoint (no {TRACKER})")
    if not (run / "config.json").is_file():
        raise UserError(f"{path}: not a megasink run: {run} has no config.json")
    iteration = newest if iteration is None else iteration
    folder = checkpoint_path(checkpoints, iteration)
    if not folder.is_dir():
        text = ", ".join(map(str, iterations(checkpoints))) or "none"
        raise UserError(f"{checkpoints}: no checkpoint of iteration {iteration}; available: {text}")
    return Checkpoint(run / "config.json", folder, iteration)


def is_run(path: Path) -> bool:
    """Return whether a folder is a megasink run or checkpoint; otherwise it is a Hugging Face one.

    Raises:
        UserError: config.json is not a JSON object.
    """
    config = path / "config.json"
    if config.is_file():
        return "arguments" in read_object(config)
    with contextlib.suppress(UserError):
        return bool(find_checkpoint(path))
    return False


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return {key: shape} of the weights in a torch_dist checkpoint, without optimizer states.

    Raises:
        UserError: the checkpoint is incomplete or untrusted.
    """
    entries = read_metadata(folder).state_dict_metadata
    refuse_damage(folder)
    tensors = {key: tuple(entry.size) for key, entry in entries.items() if hasattr(entry, "size")}
    return {key: size for key, size in tensors.items() if not key.startswith("optimizer.")}


def newest_checkpoint(folder: Path) -> int | None:
    """Return the iteration of the newest finished checkpoint in a folder, or None."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_bytes().strip()
    return int(text) if text.isdigit() and len(text) < 20 else None
