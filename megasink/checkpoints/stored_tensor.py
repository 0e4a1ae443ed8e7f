"""Read tensors from ``torch.save`` files directly into their destination.

``torch.load`` would allocate a second copy. The format is an uncompressed zip: data.pkl holds the
shape and strides, data/0, data/1, ... the bytes, and the zip's index their CRC-32.
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasink.checkpoints.damage import Part

# A zip's local header: the offset of the name and extra-field lengths, and the header's length.
_LENGTHS, _HEADER_BYTES = 26, 30
# Small enough for the CRC-32 to run while the piece is in the CPU cache.
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class StoredTensor:
    """The location of a contiguous tensor's bytes in a file, and their CRC-32 if known."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    crc: int | None = None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read_into(self, at: tuple[int, ...], target: Tensor) -> None:
        """Fill `target` with this tensor, if its CRC-32 is right, or with its slice at `at`."""
        start, step = 0, self.size
        for index, size in zip(at, self.shape, strict=False):
            step //= size
            start += index * step
        direct = target if target.is_contiguous() else torch.empty(target.shape, dtype=self.dtype)
        if direct.nbytes != step or direct.dtype != self.dtype:
            raise ValueError(f"it is {self.dtype} {list(self.shape)}")
        if step:
            crc = _read(self.path, self.start + start, direct)
            if step == self.size and self.crc not in (None, crc):
                raise ValueError("its checksum is wrong (a faulty disk or copy)")
        if direct is not target:
            target.copy_(direct)


def find_tensor(path: Path, offset: int, length: int) -> StoredTensor:
    """Locate the tensor in `length` bytes at an offset of a file."""
    with path.open("rb", buffering=0) as file:
        view = BufferedReader(Part(file, offset, length))
        # Tensor data is not read; anything but a plain tensor is refused.
        meta = torch.load(view, map_location="meta", weights_only=True)
        if not isinstance(meta, Tensor):
            raise ValueError(f"it is not a tensor but {type(meta).__name__}")
        with zipfile.ZipFile(view) as archive:
            (entry,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
        if not meta.is_contiguous() or meta.storage_offset() or entry.file_size != meta.nbytes:
            raise ValueError("it is not contiguous, or is a view of part of its storage")
        start = offset + content_start(view, entry)
    return StoredTensor(path, tuple(meta.shape), meta.dtype, start, entry.CRC)


def content_start(file: Any, entry: zipfile.ZipInfo) -> int:
    """Return the file offset of a zip entry's data."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its bytes are compressed")
    file.seek(entry.header_offset + _LENGTHS)
    return int(entry.header_offset + _HEADER_BYTES + sum(struct.unpack("<HH", file.read(4))))


def _read(path: Path, start: int, target: Tensor) -> int:
    """Fill a contiguous tensor from a file offset, and return the CRC-32 of the bytes."""
    content = memoryview(target.view(-1).view(torch.uint8).numpy())
    done, crc = 0, 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while done < len(content):
            piece = content[done : done + _PIECE_BYTES]
            count = file.readinto(piece)
            if not count:
                raise ValueError(f"it ends after {done} of {len(content)} bytes")
            crc = zlib.crc32(piece[:count], crc)
            done += count
    return crc
