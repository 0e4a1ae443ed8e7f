"""One tensor that ``torch.save`` wrote at some offset of a file, read to where it is needed.

``torch.load`` would read it into memory of its own, from which it would be copied. Its format is a
zip without compression: data.pkl says shape and strides, data/0 holds the bytes, and the index of
the zip their CRC-32.
"""

import struct
import zipfile
import zlib
from io import SEEK_CUR, SEEK_END, SEEK_SET, BufferedReader, RawIOBase
from typing import Any

import torch
from torch import Tensor

# Of a zip's local header: where the lengths of name and extra field stand, and its own length.
_LENGTHS, _HEADER_BYTES = 26, 30
# CRC-32 of a piece while it is still in the processor's cache.
_PIECE_BYTES = 2**20


class _Window(RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: RawIOBase, offset: int, length: int):
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(wanted) or 0
        self._at += count
        return count

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        self._at = offset + {SEEK_SET: 0, SEEK_CUR: self._at, SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class StoredTensor:
    """Where the bytes of a tensor are.

    Attributes:
        shape, dtype: of it.
    """

    def __init__(self, meta: Tensor, start: int, size: int, crc: int):
        self.shape, self.dtype = meta.shape, meta.dtype
        self._start, self._size, self._crc = start, size, crc

    def read_into(self, file: RawIOBase, at: tuple[int, ...], target: Tensor) -> None:
        """Fill a tensor with this one, or with what is at some leading indices of it.

        Read whole, its bytes are compared with their CRC-32.

        Raises:
            ValueError: they differ, or there are fewer than there should be.
        """
        start, step = 0, self._size
        for index, size in zip(at, self.shape, strict=False):
            step //= size
            start += index * step
        direct = target if target.is_contiguous() else torch.empty(target.shape, dtype=self.dtype)
        if direct.nbytes != step:
            raise ValueError(f"{step} bytes stand for {direct.nbytes}")
        if step:
            crc = _read(file, self._start + start, direct)
            if step == self._size and crc != self._crc:
                raise ValueError("its bytes do not have their checksum: a broken disk or copy")
        if direct is not target:
            target.copy_(direct)


def find_tensor(file: RawIOBase, offset: int, length: int) -> StoredTensor:
    """The tensor in `length` bytes at an offset.

    Raises:
        Exception: of many kinds, where it is no tensor or its description is broken.
    """
    view = BufferedReader(_Window(file, offset, length))
    # Its bytes are not read; what is no plain tensor is refused.
    meta = torch.load(view, map_location="meta", weights_only=True)
    if not isinstance(meta, Tensor):
        raise ValueError(f"it is no tensor but {type(meta).__name__}")
    view.seek(0)
    with zipfile.ZipFile(view) as archive:
        (entry,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its bytes are compressed")
    if not meta.is_contiguous() or meta.storage_offset() or entry.file_size != meta.nbytes:
        raise ValueError("its bytes are not in the order of its shape")
    view.seek(entry.header_offset + _LENGTHS)
    skipped = sum(struct.unpack("<HH", view.read(4))) + _HEADER_BYTES
    return StoredTensor(meta, offset + entry.header_offset + skipped, entry.file_size, entry.CRC)


def _read(file: RawIOBase, start: int, target: Tensor) -> int:
    """Fill a contiguous tensor from a position on; the CRC-32 of the bytes."""
    content = memoryview(target.view(-1).view(torch.uint8).numpy())
    file.seek(start)
    done, crc = 0, 0
    while done < len(content):
        piece = content[done : done + _PIECE_BYTES]
        count = file.readinto(piece)
        if not count:
            raise ValueError(f"it ends after {done} of {len(content)} bytes")
        crc = zlib.crc32(piece[:count], crc)
        done += count
    return crc
