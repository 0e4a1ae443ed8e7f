"""The index of a torch_dist checkpoint, read without running code that it names.

``.metadata`` is a pickle, as torch.distributed.checkpoint writes it, and unpickling a file of
unknown origin runs whatever it asks for. Here it may name the classes of that format alone.
"""

import pickle
from pathlib import Path, PurePath
from typing import Any

from megasink.checkpoint.stand_in import StandIn
from megasink.errors import UserError

_CLASSES_OF_METADATA = {
    "torch": {"Size"},  # and its dtypes
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
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
# Of megatron-core before 0.19; importing Megatron for them would be too early in most commands.
_MEGATRONS = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES_OF_MEGATRON = {"MCoreMetadata", "MCoreSavePlan"}


def read_metadata(checkpoint: Path) -> Any:
    """torch.distributed.checkpoint's ``Metadata`` of a folder iter_NNNNNNN.

    Raises:
        UserError: it is missing or broken, asks for anything else, or names files elsewhere.
    """
    path = checkpoint / ".metadata"
    try:
        with path.open("rb") as file:
            return load_metadata(file)
    except Exception as error:  # unpickling random bytes raises anything
        raise UserError(f"{path} is broken or not to be trusted: {error}") from error


def load_metadata(file: Any) -> Any:
    """As :func:`read_metadata`, of an open file.

    Raises:
        Exception: of many kinds, where it is broken or not to be trusted.
    """
    metadata = _Unpickler(file).load()
    for entry in (metadata.storage_data or {}).values():
        # Files of a checkpoint lie in its folder, side by side.
        if PurePath(entry.relative_path).name != entry.relative_path:
            raise pickle.UnpicklingError(f"it names the file {entry.relative_path!r}")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _MEGATRONS and name in _CLASSES_OF_MEGATRON:
            return type(name, (StandIn,), {})
        known = name in _CLASSES_OF_METADATA.get(module, ())
        if not known and (module != "torch" or "." in name):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        found = super().find_class(module, name)
        if not known and not _is_dtype(found):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found


def _is_dtype(value: Any) -> bool:
    import torch  # which is there by now, and else costs every start seconds

    return isinstance(value, torch.dtype)
