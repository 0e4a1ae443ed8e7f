"""Read the index of a torch_dist checkpoint without running code from it.

Only the classes of that format are unpickled, which torch's weights-only loader cannot read.
`stand_in` replaces unknown classes in the other pickles (code_free_loading.py).
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
_PATHS = {"PosixPath", "PurePosixPath"}
# Older checkpoints have classes of megatron-core before 0.19, which are not imported.
_MEGATRONS = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "torch": {"Size"},  # and its dtypes
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": set(
        "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType".split()
    ),
    "torch.distributed.checkpoint.metadata": set(
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING".split()
    ),
    _MEGATRONS: {"MCoreMetadata", "MCoreSavePlan"},
}


class StandIn:
    """Placeholder for an object of any class: keeps its fields, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> "StandIn":
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def append(self, *_: Any) -> None:
        """Ignore items of a list, set or mapping."""

    extend = add = __setitem__ = append


def stand_in(module: str, name: str) -> type[StandIn] | None:
    """Return a class to replace ``module.name``; None if no checkpoint should name it."""
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):  # the latter is in torch.save's pickles
        allowed = name in _KNOWN_BUILTINS
    else:
        allowed = top in _KNOWN or top not in sys.stdlib_module_names
    return type(name, (StandIn,), {"__module__": module}) if allowed else None


def read_metadata(checkpoint: Path, *, quick: bool = False) -> Any:
    """Return the ``Metadata`` of an iter_NNNNNNN folder; `quick` without torch, unchecked."""
    path = checkpoint / ".metadata"
    try:
        with open_file(path) as file:
            return load_metadata(file, quick=quick)
    except Exception as error:  # unpickling random bytes can raise anything
        raise UserError(f"{path} is broken or untrusted: {error}") from error


def load_metadata(file: Any, *, quick: bool = False) -> Any:
    """Return the ``Metadata`` in an open file; see `read_metadata`."""
    metadata = _Unpickler(file, quick=quick).load()
    for index, entry in (metadata.storage_data or {}).items():
        # All files of a checkpoint are directly in its folder.
        if PurePath(entry.relative_path).name != entry.relative_path:
            raise pickle.UnpicklingError(f"{entry.relative_path!r} is not a plain file name")
        if type(index.fqn) is not str or not _are_counts((entry.offset, entry.length)):
            raise pickle.UnpicklingError(f"it has no valid location for {index.fqn!r:.80}")
    for name, entry in () if quick else metadata.state_dict_metadata.items():
        size = getattr(entry, "size", ())
        if type(name) is not str or not (isinstance(size, tuple) and _are_counts(size)):
            raise pickle.UnpicklingError(f"it has an invalid size {size!r:.40} for {name!r:.80}")
        for chunk in getattr(entry, "chunks", ()):
            fits = len(chunk.offsets) == len(chunk.sizes) == len(size)
            if not (fits and _are_counts((*chunk.offsets, *chunk.sizes))):
                raise pickle.UnpicklingError(f"it has a chunk of the wrong size for {name!r:.80}")
    return metadata


def _are_counts(values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, *, quick: bool):
        super().__init__(file)
        self._quick = quick

    def find_class(self, module: str, name: str) -> Any:
        known = name in _ALLOWED.get(module, ())
        if known or (module == "torch" and "." not in name):
            if module == _MEGATRONS or (self._quick and module.startswith("torch")):
                return type(name, (StandIn,), {})
            value = super().find_class(module, name)
            if known or isinstance(value, sys.modules["torch"].dtype):
                return value
        raise pickle.UnpicklingError(f"it refers to the code {module}.{name}")
