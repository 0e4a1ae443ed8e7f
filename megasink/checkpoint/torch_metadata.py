"""The index of a torch_dist checkpoint, read without running code that it names.

``.metadata`` is a pickle, as torch.distributed.checkpoint writes it, and unpickling a file of
unknown origin runs whatever it asks for. Here it may name the classes of that format alone.
"""

import pickle
from pathlib import Path
from typing import Any

from megasink.errors import UserError

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


def read_metadata(checkpoint: Path) -> Any:
    """torch.distributed.checkpoint's ``Metadata`` of a folder iter_NNNNNNN.

    Raises:
        UserError: it is missing or broken, or asks for anything else.
    """
    try:
        with (checkpoint / ".metadata").open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # unpickling random bytes raises anything
        raise UserError(
            f"{checkpoint}/.metadata is broken or not to be trusted: {error}"
        ) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES_OF_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
