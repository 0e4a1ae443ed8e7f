"""Write a `.bin` and its `.idx` in bounded memory, and find damage in them.

Megatron's builder (core/datasets/indexed_dataset.py:923) keeps a number for each document, imports
torch, and cannot continue after a kill. It maps both files without checks.
"""

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megasink.data.dataset_files import Written, read_sidecar

HEADER = struct.Struct("<9sQBQQ")
"""indexed_dataset.py:157: magic, version, token type, numbers of sequences and of boundaries."""
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BLOCK = 1 << 16  # entries of the index in memory at once


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
        """Append documents, or parts; `last` has whether a document ends with each."""
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
            file.flush()
            os.fdatasync(file.fileno())
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


def _opened(path: Path, size: int) -> BinaryIO:
    """Open a file to append to its first `size` bytes; never through a link."""
    if not size:
        path.unlink(missing_ok=True)
        return path.open("xb")
    if path.is_symlink() or path.stat().st_size < size:
        raise OSError(f"{path} has fewer than the {size:,} bytes that were written")
    file = path.open("r+b")
    file.truncate(size)
    file.seek(size)
    return file


ENTRIES = 1 << 20
"""Maximum number of index entries and tokens to check. A larger file is checked at the start, the
end and places between."""
_PLACES = 16


class _Damage(Exception):
    """A description of the damage."""


@dataclass(frozen=True)
class _Index:
    """The arrays of an index, mapped."""

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[Any]  # [sequences] int32 tokens of each
    pointers: NDArray[Any]  # [sequences] int64 bytes in the `.bin`
    ends: NDArray[Any]  # [documents] int64 first sequence of each, then the number of sequences


def data_problem(prefix: str, vocabulary: int | None, entries: int = ENTRIES) -> str | None:
    """Return why Megatron could not train on a data set; None if no problem is found."""
    # Compares file sizes, some entries of the index and PREFIX.json, or tokens without it. Reads at
    # most 50 MB. `vocabulary` is the number of ids that the model knows, None for any.
    try:
        index = _read_header(Path(f"{prefix}.idx"))
        size = _size(Path(f"{prefix}.bin"))
        _check_entries(index, size, entries)
        _check_sidecar(prefix, index, size)
        if vocabulary is None:
            return None
        return _ids_problem(prefix, index, size, vocabulary, entries)
    except _Damage as damage:
        return f"{damage}: make the data set again"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return f"{prefix}.bin and .idx cannot be read: {reason}"


def sequence_lengths(prefix: str) -> NDArray[Any] | None:
    """Return [sequences] int32 tokens of each sequence; None if `data_problem` finds a problem."""
    try:
        return _read_header(Path(f"{prefix}.idx")).lengths
    except (OSError, ValueError, _Damage):
        return None


def has_tokens(lengths: NDArray[Any]) -> bool:
    """Return whether any of [N] sequences has a token. Reads as few of the lengths as possible."""
    return any(
        (lengths[start : start + _BLOCK] > 0).any() for start in range(0, len(lengths), _BLOCK)
    )


def _size(path: Path) -> int:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return facts.st_size


def _read_header(path: Path) -> _Index:
    size = _size(path)
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise _Damage(f"{path} is cut short: it has {size} bytes, less than a header")
    magic, version, code, sequences, documents = HEADER.unpack(head)
    if magic != MAGIC or version != 1:
        raise _Damage(f"{path} is not a Megatron index (its first bytes are {head[:9]!r})")
    if code not in DTYPES:
        raise _Damage(f"{path} has the token type {code}, which is not an integer type")
    needed = HEADER.size + 12 * sequences + 8 * documents
    # Multimodal indices have one more byte per sequence.
    if size not in (needed, needed + sequences):
        raise _Damage(
            f"{path} has {size:,} bytes, but its {sequences:,} sequences and {documents:,} "
            f"document boundaries need {needed:,}: it is cut short or damaged"
        )
    if not sequences or not documents:
        raise _Damage(f"{path} has no documents")
    parts = (("<i4", sequences, 0), ("<i8", sequences, 4), ("<i8", documents, 12))
    arrays = (
        np.memmap(path, kind, "r", HEADER.size + each * sequences, (count,))
        for kind, count, each in parts
    )
    return _Index(path, np.dtype(DTYPES[code]).newbyteorder("<"), *arrays)


def _check_entries(index: _Index, size: int, entries: int) -> None:
    lengths, pointers, ends = index.lengths, index.pointers, index.ends
    sequences = len(lengths)
    if ends[0] != 0 or ends[-1] != sequences:
        raise _Damage(
            f"{index.path} has documents from sequence {ends[0]} to {ends[-1]}, not from 0 to "
            f"{sequences}"
        )
    for part in _sampled_slices(len(ends), entries):
        falling = np.flatnonzero((np.diff(ends[part]) < 0) | (ends[part][1:] > sequences))
        if len(falling):
            at = part.start + int(falling[0]) + 1
            raise _Damage(f"{index.path}: document {at} begins before the previous one")
    width = index.dtype.itemsize
    for part in _sampled_slices(sequences, entries):
        begins = pointers[part].astype(np.int64)
        counts = lengths[part].astype(np.int64)
        # Not begins + counts * width, which overflows for a large pointer.
        wrong = (counts < 0) | (begins < 0) | (begins > size) | (counts > (size - begins) // width)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise _Damage(
                f"{index.path}: sequence {part.start + at} has {counts[at]:,} tokens of {width} "
                f"bytes starting at byte {begins[at]:,}, but {index.path.with_suffix('.bin')} has "
                f"{size:,} bytes: it is cut short, or belongs to another data set"
            )
        # A pointer is the sum of the lengths before it, up to the size of the .bin.
        after = pointers[part.stop : part.stop + 1] if part.stop < sequences else [size]
        ends_at, next_at = begins + counts * width, np.append(begins[1:], after)
        apart = np.flatnonzero(ends_at != next_at)
        if len(apart) or begins[0] * (part.start == 0):
            at = int(apart[0]) if len(apart) else 0
            raise _Damage(
                f"{index.path}: sequence {part.start + at} spans bytes {begins[at]:,} to "
                f"{ends_at[at]:,}, but the next one begins at byte {next_at[at]:,}"
            )


def _sampled_slices(count: int, budget: int = ENTRIES) -> Iterator[slice]:
    """Yield slices of `count` entries: a single one, or evenly spaced ones within the budget."""
    if count <= budget:
        yield slice(0, count)
        return
    size = budget // _PLACES
    for place in range(_PLACES):
        start = (count - size) * place // (_PLACES - 1)
        yield slice(start, start + size)


def _check_sidecar(prefix: str, index: _Index, size: int) -> None:
    """Compare the number of tokens with the sidecar's."""
    tokens = read_sidecar(prefix).get("tokens", size // index.dtype.itemsize)
    if type(tokens) is not int:
        raise _Damage(f"{prefix}.json gives {tokens!r:.40} as the number of tokens")
    if tokens * index.dtype.itemsize != size:
        raise _Damage(
            f"{prefix}.bin has {size:,} bytes, but {prefix}.json states {tokens:,} tokens of "
            f"{index.dtype.itemsize} bytes: one of them belongs to another data set"
        )


def _ids_problem(
    prefix: str, index: _Index, size: int, vocabulary: int, entries: int
) -> str | None:
    but = f"but the vocabulary has only {vocabulary:,} ids: use the tokenizer of the data set"
    largest = read_sidecar(prefix).get("largest_id")
    if isinstance(largest, int) and largest >= vocabulary:
        return f"{prefix}.bin contains the id {largest:,} according to {prefix}.json, {but}"
    count = size // index.dtype.itemsize
    if not count:
        return None  # numpy cannot map an empty file
    tokens = np.memmap(f"{prefix}.bin", index.dtype, "r", shape=(count,))
    for part in _sampled_slices(count, entries):
        ids = tokens[part]
        wrong = (ids < 0) | (ids >= vocabulary)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            return f"{prefix}.bin contains the id {ids[at]:,} at token {part.start + at:,}, {but}"
    return None
