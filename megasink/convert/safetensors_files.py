"""Safetensors files of a Hugging Face folder, read and written tensor by tensor.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON
header, the header with the dtype, shape and byte range of each tensor, then the data. The library
writes a file only from tensors that are all in memory; here all shapes are known before the first
tensor is converted, so the header is written first.

An MXFP4 weight NAME (GPT-OSS) is two tensors of bytes: NAME_blocks [E, R, G, 16] has blocks of 32
numbers of four bits, two a byte, the lower half first, and NAME_scales [E, R, G] their exponents.

Shapes: E experts, R rows, G blocks of a row.
"""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasink.errors import UserError
from megasink.files.atomic import sync
from megasink.files.weight_files import INDEX, weight_files

Entry = tuple[str, Tensor]
"""The name of a tensor to write, and a meta tensor of its shape and dtype."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ROWS = 1024  # compared at a time
# Amount after which to start flushing to disk.
_FLUSH_BYTES = 128 * 2**20
_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of an exponent


def write_weights(
    folder: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], shard_bytes: int
) -> list[str]:
    """Write tensors into files of at most `shard_bytes`; a larger tensor gets its own file."""
    shards = _cut(entries, shard_bytes)
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    data = iter(tensors)
    for file_name, shard in zip(names, shards, strict=True):
        with (folder / file_name).open("xb") as file, ThreadPoolExecutor(1) as disk:
            file.write(_header(shard))
            flushed, flushes = 0, []
            for name, like in shard:
                file.write(_bytes(next(data), name, like))
                if file.tell() - flushed > _FLUSH_BYTES:  # while the next is converted
                    flushed = file.tell()
                    flushes.append(disk.submit(os.fdatasync, file.fileno()))
            for flush in flushes:
                flush.result()
            sync(file)
    if next(data, None) is not None:
        raise ValueError("there are more tensors than were planned")
    if count > 1:
        index = {
            "metadata": {"total_size": sum(like.nbytes for _, like in entries)},
            "weight_map": {
                name: file_name
                for file_name, shard in zip(names, shards, strict=True)
                for name, _ in shard
            },
        }
        write_json(folder / INDEX, index)
    return names


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
    for name, like in entries:
        end = start + like.nbytes
        header[name] = {
            "dtype": _NAMES[like.dtype],
            "shape": list(like.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor, name: str, like: Tensor) -> memoryview:
    if (tensor.dtype, tensor.shape) != (like.dtype, like.shape):
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not the planned {like}")
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


class HuggingFaceWeights:
    """The weights in a Hugging Face folder; `names` has all tensors, those in MXFP4 unpacked."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            if not path.is_file():
                raise UserError(f"{folder}: {path.name} is missing: copy the whole folder again")
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is broken ({error}): copy it again") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)
        if not self._file_of:
            pickles = sorted(path.name for path in folder.glob("*.bin"))
            why = f" ({pickles[0]} is a pickle, which can run code: convert it first)"
            raise UserError(f"{folder} has no model.safetensors{why if pickles else ''}")
        stored = frozenset(self._file_of)
        packed = {name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)}
        self._packed = frozenset(name for name in packed if name + _SCALES in stored)
        halves = {name + half for name in self._packed for half in (_BLOCKS, _SCALES)}
        self.names = stored - halves | self._packed

    def meta(self, name: str, expert: int | None = None) -> Tensor:
        """Return a meta tensor of the shape and dtype of `read`."""
        if name in self._packed:
            halves = [self._slice(name + half) for half in (_BLOCKS, _SCALES)]
            if kinds := {half.get_dtype() for half in halves} - {"U8"}:
                raise UserError(
                    f"{self.folder}: {name}{_BLOCKS} or {name}{_SCALES} is {kinds.pop()}, not U8"
                )
            both = (half.get_shape() for half in halves)
            whole = torch.empty(_unpacked_shape(name, *both), dtype=torch.bfloat16, device="meta")
            return whole if expert is None else whole[expert : expert + 1]
        part = self._slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UserError(
                f"{self.folder}: {name} is {part.get_dtype()}, which is not supported: save it as "
                f"one of {', '.join(DTYPES)} first"
            )
        whole = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        return whole if expert is None else whole[expert : expert + 1]

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read a tensor, or one expert of it, [1, ...]."""
        if name in self._packed:
            return unpack(self._part(name + _BLOCKS, expert), self._part(name + _SCALES, expert))
        return self._part(name, expert)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two matrices are equal; a few rows at a time are in memory."""
        if self.meta(one).shape != self.meta(other).shape:
            return False
        parts = self._slice(one), self._slice(other)
        starts = range(0, len(self.meta(one)), _ROWS)
        return all(torch.equal(*(part[i : i + _ROWS].double() for part in parts)) for i in starts)

    def _part(self, name: str, expert: int | None) -> Tensor:
        part: Tensor = (
            self._file_of[name].get_tensor(name)
            if expert is None
            else self._slice(name)[expert : expert + 1]
        )
        return part

    def _slice(self, name: str) -> Any:
        return self._file_of[name].get_slice(name)


def _unpacked_shape(name: str, blocks: list[int], scales: list[int]) -> list[int]:
    """Return the shape of a weight, given those of its two tensors."""
    if len(blocks) != 4 or blocks[3] != 16 or blocks[:3] != scales:
        raise UserError(
            f"{name}{_BLOCKS} {blocks} and {name}{_SCALES} {scales} do not match: MXFP4 needs "
            "[experts, rows, blocks, 16] and [experts, rows, blocks]"
        )
    experts, rows, count, _ = blocks
    return [experts, count * 32, rows]


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a weight in bfloat16, which holds them exactly."""
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=torch.bfloat16)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = values[halves.int()]
    exponents = (scales.int() - _BIAS)[..., None]
    return torch.ldexp(numbers, exponents).flatten(2).transpose(1, 2)
