"""Read the index of a torch_dist checkpoint without running code from it.

torch.distributed.checkpoint pickles ``.metadata``, and unpickling an untrusted file can run
arbitrary code. Only the classes of that format are allowed here. In other pickles of a checkpoint
(arguments, random states, optimizers), a stand-in takes the place of every class.
"""

import pickle
import sys
from pathlib import Path, PurePath
from typing import Any

from megasink.errors import UserError
from megasink.files.json_file import open_file

# Standard library modules that arguments, random states and enums need; others are refused.
_KNOWN = {"argparse", "collections", "types", "enum", "signal", "pathlib", "io", "_codecs"}
_KNOWN_BUILTINS = {"set", "frozenset", "bytearray", "complex", "slice", "range", "getattr"}


class StandIn:
    """Placeholder for an object of any class: keeps its fields, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore a list item."""

    def extend(self, values: Any) -> None:
        """Ignore list items."""

    def add(self, value: Any) -> None:
        """Ignore a set item."""


def stand_in(module: str, name: str) -> type[StandIn] | None:
    """Return a class to replace ``module.name``; None if no checkpoint should name it."""
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):  # the latter is in torch.save's pickles
        allowed = name in _KNOWN_BUILTINS
    else:
        allowed = top in _KNOWN or top not in sys.stdlib_module_names
    return type(name, (StandIn,), {"__module__": module}) if allowed else None


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
# From megatron-core before 0.19; most commands must not import Megatron this early.
_MEGATRONS = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES_OF_MEGATRON = {"MCoreMetadata", "MCoreSavePlan"}


def read_metadata(checkpoint: Path) -> Any:
    """Return torch.distributed.checkpoint's ``Metadata`` of an iter_NNNNNNN folder."""
    path = checkpoint / ".metadata"
    try:
        with open_file(path) as file:
            return load_metadata(file)
    except Exception as error:  # unpickling random bytes can raise anything
        raise UserError(f"{path} is broken or untrusted: {error}") from error


def stored_entries(checkpoint: Path, *, quick: bool = False) -> list[Any]:
    """Return the places of an iter_NNNNNNN folder's tensors: relative_path, offset and length."""
    if not quick:
        return list(read_metadata(checkpoint).storage_data.values())
    path = checkpoint / ".metadata"
    try:
        with open_file(path) as file:
            return list(load_metadata(file, _QuickUnpickler).storage_data.values())
    except Exception as error:  # unpickling random bytes can raise anything
        raise UserError(f"{path} is broken or untrusted: {error}") from error


def load_metadata(file: Any, unpickler: type[pickle.Unpickler] | None = None) -> Any:
    """Return the ``Metadata`` in an open file; see :func:`read_metadata`."""
    metadata = (unpickler or _Unpickler)(file).load()
    for index, entry in (metadata.storage_data or {}).items():
        # All files of a checkpoint are directly in its folder.
        if PurePath(entry.relative_path).name != entry.relative_path:
            raise pickle.UnpicklingError(f"it names the file {entry.relative_path!r}")
        if not (_is_text(index.fqn) and _are_counts((entry.offset, entry.length))):
            raise pickle.UnpicklingError(f"it has no place for the entry {index.fqn!r:.80}")
    # Without torch, sizes are stand-ins.
    for name, entry in () if unpickler else metadata.state_dict_metadata.items():
        size = getattr(entry, "size", ())
        if not (_is_text(name) and isinstance(size, tuple) and _are_counts(size)):
            raise pickle.UnpicklingError(f"it has the size {size!r:.40} for {name!r:.80}")
        for chunk in getattr(entry, "chunks", ()):
            fits = len(chunk.offsets) == len(chunk.sizes) == len(size)
            if not (fits and _are_counts((*chunk.offsets, *chunk.sizes))):
                raise pickle.UnpicklingError(f"it has a chunk of the wrong size for {name!r:.80}")
    return metadata


def _is_text(value: Any) -> bool:
    return type(value) is str


def _are_counts(values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == _MEGATRONS and name in _CLASSES_OF_MEGATRON:
            return type(name, (StandIn,), {})
        known = name in _CLASSES_OF_METADATA.get(module, ())
        if known or (module == "torch" and "." not in name):
            import torch  # importing it earlier costs every start seconds

            value = super().find_class(module, name)
            if known or isinstance(value, torch.dtype):
                return value
        raise pickle.UnpicklingError(f"it refers to the code {module}.{name}")


class _QuickUnpickler(pickle.Unpickler):
    """Makes stand-ins of torch's classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("collections", "pathlib", "pathlib._local"):
            if name in _CLASSES_OF_METADATA[module]:
                return super().find_class(module, name)
        elif name in _CLASSES_OF_METADATA.get(module, ()) or (
            (module == "torch" and "." not in name)
            or (module == _MEGATRONS and name in _CLASSES_OF_MEGATRON)
        ):
            return type(name, (StandIn,), {})
        raise pickle.UnpicklingError(f"it refers to the code {module}.{name}")
