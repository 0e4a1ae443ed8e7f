"""Write a `.bin` and its `.idx` in bounded memory, so that a later process can continue.

Megatron's own builder (core/datasets/indexed_dataset.py:923) keeps a Python number for each
document, imports torch, and cannot continue; the bytes here are the same.
"""

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megasink.data.output import Written

HEADER = struct.Struct("<9sQBQQ")
"""indexed_dataset.py:157: magic, version, token type, numbers of sequences and of boundaries."""
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BLOCK = 1 << 16  # documents of the index in memory at once


def token_dtype(vocab_size: int) -> str:
    """Return the type of token ids that Megatron would choose (indexed_dataset.py:107)."""
    return "uint16" if vocab_size < 65500 else "int32"


class IndexedWriter:
    """Appends tokens to a .bin, and int32 lengths from which `finish` makes the index."""

    def __init__(self, tokens: Path, lengths: Path, dtype: str, start: Written | None = None):
        self.dtype = np.dtype(dtype)
        start = start or Written()
        self._lengths_path = lengths
        self._documents = start.documents
        self._tokens = _opened(tokens, start.token_bytes)
        self._lengths = _opened(lengths, 4 * start.documents)
        self._unfinished = 0  # tokens of a document that has only begun

    def add(self, tokens: NDArray[Any], lengths: list[int], last: list[bool] | None = None) -> None:
        """Append documents, or parts of them: their tokens [N] and lengths.

        `last` has whether a document ends with each; None if all do.
        """
        self._tokens.write(np.asarray(tokens, self.dtype).tobytes())
        ended = []
        for length, ends in zip(lengths, last or [True] * len(lengths), strict=True):
            self._unfinished += length
            if ends:
                ended.append(self._unfinished)
                self._unfinished = 0
        self._lengths.write(np.array(ended, "<i4").tobytes())
        self._documents += len(ended)

    def sync(self) -> Written | None:
        """Sync to disk, and return the written part; None inside a document."""
        if self._unfinished:
            return None
        for file in (self._tokens, self._lengths):
            sync_data(file)
        return Written(self._documents, self._tokens.tell())

    def finish(self, index: Path) -> None:
        """Close the files, and write the index."""
        for file in (self._tokens, self._lengths):
            file.close()
        path = self._lengths_path
        lengths = np.memmap(path, "<i4", "r") if path.stat().st_size else np.zeros(0, "<i4")
        write_index(index, [lengths], self.dtype)

    def close(self) -> None:
        """Close the files unfinished."""
        self._tokens.close()
        self._lengths.close()


def write_index(index: Path, parts: list[NDArray[np.int32]], dtype: np.dtype[Any]) -> None:
    """Write the index of documents of one sequence each, from parts of their lengths in order."""
    index.unlink(missing_ok=True)  # never write through a link
    count = sum(map(len, parts))
    code = next(code for code, name in DTYPES.items() if name == dtype.name)
    with index.open("xb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        for part in parts:
            for start in range(0, len(part), _BLOCK):
                file.write(part[start : start + _BLOCK].astype("<i4").tobytes())
        pointer = 0
        for part in parts:
            for start in range(0, len(part), _BLOCK):
                sizes = part[start : start + _BLOCK].astype("<i8") * dtype.itemsize
                ends = pointer + np.cumsum(sizes)
                file.write((ends - sizes).astype("<i8").tobytes())
                pointer = int(ends[-1])
        for start in range(0, count + 1, _BLOCK):
            file.write(np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").tobytes())


def sync_data(file: BinaryIO) -> None:
    """Put a file's content on disk."""
    file.flush()
    os.fdatasync(file.fileno())


def _opened(path: Path, size: int) -> BinaryIO:
    """Open a file to append to its first `size` bytes; never through a link."""
    if not size:
        path.unlink(missing_ok=True)
        return path.open("xb")
    if path.is_symlink() or path.stat().st_size < size:
        raise OSError(f"{path} has less than the {size:,} bytes that were written")
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file
