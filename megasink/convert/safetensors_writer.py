"""Safetensors files written tensor by tensor: nothing is held that is already on disk.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON
header, the header with the dtype, shape and byte range of each tensor, then the bytes. All shapes
are known before the first tensor is, so the headers are written first.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megasink.atomic import sync
from megasink.convert.background import BackgroundWriter
from megasink.errors import UserError

Entry = tuple[str, Tensor]
"""A name and an empty tensor, on the device "meta", of what will be written under it."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Written at once: a large tensor is freed piece by piece.
_PIECE_BYTES = 16 * 2**20


class SafetensorsWriter(BackgroundWriter):
    """Writes planned tensors, in their order, into files of at most `shard_bytes`.

    A tensor larger than that has a file of its own. As a context: the end of the body ends the
    thread that writes.

    Args:
        folder: exists.
        entries: everything that will be written.
        shard_bytes: of one file.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry], shard_bytes: int):
        super().__init__()
        self._folder = folder
        self._shards = _cut(entries, shard_bytes)
        self._names = _file_names(len(self._shards))
        self._position = (0, 0)  # shard, entry in it
        self.total_bytes = sum(tensor.nbytes for _, tensor in entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next tensor of the plan."""
        shard, place = self._position
        wanted, like = self._shards[shard][place]
        if (name, tensor.dtype, tensor.shape) != (wanted, like.dtype, like.shape):
            raise ValueError(f"{name} {tensor.dtype} {list(tensor.shape)}: next is {wanted} {like}")
        if tensor.numel():
            content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        else:
            content = memoryview(b"")
        for start in range(0, max(1, len(content)), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            first = start == 0 and place == 0
            self._background.run(len(piece), partial(self._append, shard, piece, first))
        if place + 1 < len(self._shards[shard]):
            self._position = (shard, place + 1)
            return
        self._background.run(0, self._close_file)
        self._position = (shard + 1, 0)

    def _append(self, shard: int, content: memoryview, first: bool) -> None:
        if first:
            self._file = (self._folder / self._names[shard]).open("xb")
            self._file.write(_header(self._shards[shard]))
        assert self._file is not None
        self._file.write(content)
        self._background.wrote(self._file, len(content))

    def finish(self) -> list[str]:
        """Write the index, where there is more than one file.

        Returns:
            the names of the files.
        """
        if self._position != (len(self._shards), 0):
            raise ValueError("some planned tensors were not written")
        self._background.wait()
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


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB" or a plain number.

    Raises:
        UserError: it is none.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text, 1
    for name, value in units.items():
        if text.upper().endswith(name):
            number, unit = text[: -len(name)], value
    try:
        size = int(float(number) * unit)
    except ValueError:
        size = 0
    if size <= 0:
        raise UserError(f"--shard-size {text}: give a size such as 5GB or 500MB")
    return size


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


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
