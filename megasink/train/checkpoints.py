"""What lies in a checkpoint folder, read without running any code that it holds.

A torch_dist checkpoint is pickled in part. Weights are read as plain tensors (``weights_only``),
arguments from the run's config.json; ``.metadata``, the one pickle that torch's format needs, may
name classes of that format alone.
"""

import pickle
import re
from pathlib import Path
from typing import Any, NamedTuple

from megasink.errors import UserError
from megasink.train.run_dir import newest_checkpoint

_CLASSES_OF_METADATA = {
    "torch": {
        "Size",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "uint8",
        "bool",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class Checkpoint(NamedTuple):
    """A finished checkpoint of a run.

    Attributes:
        config: the run's config.json.
        folder: with the .distcp files of one iteration.
        iteration: the step after which it was saved.
    """

    config: Path
    folder: Path
    iteration: int


def find_checkpoint(path: Path, iteration: int | None = None) -> Checkpoint:
    """The checkpoint that a user means by a folder.

    Raises:
        UserError: no such folder, no finished checkpoint in it, or not that iteration.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run folder or its checkpoint folder")
    named = re.fullmatch(r"iter_(\d{7,})", path.resolve().name)
    if named:
        if iteration not in (None, int(named[1])):
            raise UserError(f"{path} is not the checkpoint of iteration {iteration}")
        iteration, path = int(named[1]), path.resolve().parent
    run, checkpoints = (path, path / "checkpoints")
    if not (path / "config.json").is_file() and not checkpoints.is_dir():
        run, checkpoints = path.resolve().parent, path
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        raise UserError(f"{path}: no finished checkpoint (no latest_checkpointed_iteration.txt)")
    if not (run / "config.json").is_file():
        raise UserError(f"{path}: no config.json in {run}: it is no run of megasink")
    iteration = newest if iteration is None else iteration
    folder = checkpoints / f"iter_{iteration:07d}"
    if not (folder / ".metadata").is_file():
        there = sorted(int(p.parent.name[5:]) for p in checkpoints.glob("iter_*/.metadata"))
        text = ", ".join(map(str, there)) or "none"
        raise UserError(f"{checkpoints}: no checkpoint of iteration {iteration}; there are: {text}")
    return Checkpoint(run / "config.json", folder, iteration)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """{key: shape} of the model's weights in a torch_dist checkpoint, without optimizer states.

    Raises:
        UserError: .metadata is broken, or would run code that is not of the format.
    """
    try:
        with (folder / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        entries = metadata.state_dict_metadata.items()
        tensors = {key: tuple(entry.size) for key, entry in entries if hasattr(entry, "size")}
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise UserError(f"{folder}/.metadata is broken or not to be trusted: {error}") from error
    return {key: size for key, size in tensors.items() if not key.startswith("optimizer.")}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES_OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
