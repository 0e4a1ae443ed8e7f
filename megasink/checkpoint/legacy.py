"""Read Megatron's legacy checkpoints (``--ckpt-format torch``) without running pickled code.

iter_NNNNNNN/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt is one pickle per rank. Besides the weights
it holds arguments, random states and optimizers as objects of many classes. None of these is
instantiated: every class or function in the pickle, except those that describe tensors, becomes an
empty stand-in. Names that no such checkpoint needs (os.system, eval, ...) are refused.
"""

import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megasink.checkpoint.stand_in import StandIn, stand_in
from megasink.checkpoint.stored_tensor import StoredTensor, content_start
from megasink.errors import UserError

FILE = "model_optim_rng.pt"
_KINDS = ("tensor", "pipeline", "expert")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
}


class RankFile(NamedTuple):
    """What one rank saved.

    Attributes:
        arguments: the run's arguments.
        chunks: {parameter name: tensor} for each virtual pipeline stage.
    """

    arguments: dict[str, Any]
    chunks: list[dict[str, StoredTensor]]


def is_legacy(folder: Path) -> bool:
    """Whether an iter_NNNNNNN folder has the legacy format."""
    return not (folder / ".metadata").is_file() and any(folder.glob("mp_rank_*"))


def read_ranks(folder: Path) -> dict[tuple[int, int, int], RankFile]:
    """Return {(tensor rank, pipeline rank, expert rank): contents}, without reading tensor data.

    Raises:
        UserError: a file is missing, corrupt or untrusted.
    """
    files = {path.name: path / FILE for path in sorted(folder.glob("mp_rank_*"))}
    first = _read(next(iter(files.values())))
    sizes = [int(first.arguments.get(f"{kind}_model_parallel_size") or 1) for kind in _KINDS]
    tp, pp, ep = sizes
    layout = f"TP={tp} x PP={pp} x EP={ep}"
    ranks: dict[tuple[int, int, int], RankFile] = {}
    for name, path in files.items():
        numbers = [int(n) for n in name.removeprefix("mp_rank_").split("_") if n.isdigit()]
        if len(numbers) != 1 + (pp > 1) + (ep > 1):
            raise UserError(f"{folder}: {name} does not fit the layout in its arguments, {layout}")
        pipeline = numbers[1] if pp > 1 else 0
        ranks[numbers[0], pipeline, numbers[-1] if ep > 1 else 0] = _read(path)
    for stage in range(pp):
        here = [(t, e) for t, p, e in ranks if p == stage]
        if {t for t, _ in here} != set(range(tp)) or {e for _, e in here} != set(range(ep)):
            raise UserError(f"{folder} is incomplete: {layout}, but only {', '.join(files)}")
    return ranks


def _read(path: Path) -> RankFile:
    """Read one rank's file, without tensor data.

    Raises:
        UserError: the file is missing, corrupt or untrusted.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            entries = {e.filename.partition("/")[2]: e for e in archive.infolist()}
            with archive.open(entries["data.pkl"]) as pickled:
                state = _Unpickler(pickled, path, entries, file).load()
        arguments = vars(state["args"])
        models = (name for name in state if re.fullmatch(r"model\d*", name))
        names = sorted(models, key=lambda name: int(name.removeprefix("model") or 0))
        chunks = [_tensors(state[name]) for name in names]
    except Exception as error:  # unpickling random bytes can raise anything
        why = str(error) or type(error).__name__
        raise UserError(f"{path} is broken or untrusted: {why}") from error
    return RankFile(arguments, chunks)


def _tensors(state: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors, without TransformerEngine's FP8 states."""
    tensors = {}
    for name, value in state.items():
        if isinstance(value, StoredTensor):
            tensors[name] = value
        elif not name.endswith("_extra_state"):
            raise ValueError(f"{name} is not a plain tensor")
    return tensors


class _Storage(NamedTuple):
    """Bytes that tensors may share: dtype, location and CRC-32."""

    dtype: torch.dtype | None
    start: int
    size: int
    crc: int


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: Any, path: Path, entries: dict[str, zipfile.ZipInfo], file: Any):
        super().__init__(pickled)
        self._path, self._entries, self._file = path, entries, file

    def persistent_load(self, saved_id: Any) -> _Storage:
        _, kind, key, _, _ = saved_id
        entry = self._entries[f"data/{key}"]
        start = content_start(self._file, entry)
        return _Storage(kind, start, entry.file_size, entry.CRC)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return _STORAGES.get(name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("torch._utils", "torch._tensor") and name in _REBUILDING:
            return self._tensor if name == "_rebuild_tensor_v2" else _REBUILDING[name]
        if (made := stand_in(module, name)) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return made

    def _tensor(
        self, storage: _Storage, offset: int, size: Any, stride: Any, *_: Any
    ) -> StoredTensor | StandIn:
        shape = tuple(size)
        if storage.dtype is None or stride != torch.empty(shape, device="meta").stride():
            return StandIn()  # optimizer or random state, or not contiguous
        start = storage.start + offset * storage.dtype.itemsize
        whole = torch.Size(shape).numel() * storage.dtype.itemsize == storage.size
        crc = storage.crc if whole else None
        return StoredTensor(self._path, shape, storage.dtype, start, crc)


# Functions that torch.save uses for tensors, parameters, and tensors with attributes.
_REBUILDING: dict[str, Any] = {
    "_rebuild_tensor_v2": None,
    "_rebuild_parameter": lambda data, *_: data,
    "_rebuild_parameter_with_state": lambda data, *_: data,
    "_rebuild_from_type_v2": lambda function, _, arguments, *__: function(*arguments),
}
