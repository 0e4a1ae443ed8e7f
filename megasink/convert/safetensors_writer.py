"""Write safetensors files tensor by tensor, without holding tensors that are already on disk.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON
header, the header with the dtype, shape and byte range of each tensor, then the data. All shapes
are known before the first tensor is converted, so the headers are written first.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasink.atomic import sync
from megasink.convert.background import BackgroundWriter

Entry = tuple[str, Tensor]
"""A name, and a meta tensor like the one to be written under it."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Size of a write: a large tensor is freed piece by piece.
_PIECE_BYTES = 16 * 2**20


class SafetensorsWriter(BackgroundWriter):
    """Writes planned tensors, in order, into files of at most `shard_bytes`.

    A larger tensor gets its own file. The end of the context ends the writing thread.

    Args:
        folder: an existing folder.
        entries: all tensors to be written.
        shard_bytes: maximum size of a file.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], shard_bytes: int):
        super().__init__()
        self._folder = folder
        self._shards = _cut(entries, shard_bytes)
        count = len(self._shards)
        self._names = ["model.safetensors"]
        if count > 1:
            self._names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self._position = (0, 0)  # shard, entry in it
        self.total_bytes = sum(tensor.nbytes for _, tensor in entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next planned tensor."""
        shard, place = self._position
        wanted, like = self._shards[shard][place]
        if (name, tensor.dtype, tensor.shape) != (wanted, like.dtype, like.shape):
            raise ValueError(f"{name} {tensor.dtype} {list(tensor.shape)}: next is {wanted} {like}")
        content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        for start in range(0, max(1, len(content)), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            first = start == 0 and place == 0
            self._run(len(piece), partial(self._append, shard, piece, first))
        if place + 1 < len(self._shards[shard]):
            self._position = (shard, place + 1)
            return
        self._run(0, self._close_file)
        self._position = (shard + 1, 0)

    def _append(self, shard: int, content: memoryview, first: bool) -> None:
        if first:
            self._file = (self._folder / self._names[shard]).open("xb")
            self._file.write(_header(self._shards[shard]))
        assert self._file is not None
        self._file.write(content)
        self._wrote(len(content))

    def finish(self) -> list[str]:
        """Write the index if there are several files, and return the file names."""
        if self._position != (len(self._shards), 0):
            raise ValueError("some planned tensors were not written")
        self._wait()
        if len(self._shards) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {
                    name: file
                    for shard, file in zip(self._shards, self._names, strict=True)
                    for name, _ in shard
                },
            }
            write_json(self._folder / "model.safetensors.index.json", index)
        return self._names


def write_json(path: Path, content: object) -> None:
    """Write and sync a JSON file."""
    with path.open("wb") as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
        sync(file)


def _cut(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = entry[1].nbytes
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in entries:
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
