"""Read documents from files, folders, JSON Lines, parquet and the Python standard library.

The order is fixed: inputs as given, folders by sorted relative path, records in file order.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Literal

from megasink.console.printable import printable
from megasink.console.progress import progress
from megasink.data import input_files
from megasink.data.input_files import File, Place, Span
from megasink.errors import ConfigError, UserError

Split = Literal["auto", "paragraphs", "never"]

MAX_DOCUMENT_BYTES = 128 << 20
"""Limit per text file, line or cell. Each is loaded as a whole, which takes up to ten times its
size in memory."""
_HEAD_BYTES = 1 << 20  # that show whether a file is text
_RATIO = 1000  # gzip reaches 1032, but only for zeros
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a document, and its origin (`path`, `path¶part`, `path:line` or `path#row`)."""

    text: str
    source: str


@dataclass
class Skipped:
    """Skipped documents: counts, and the first few sources that are not UTF-8 text."""

    invalid_utf8: int = 0
    empty: int = 0
    examples: list[str] = field(default_factory=list)


# A reader yields: source, text (None if the bytes are not UTF-8), bytes read of the file so far,
# the number of the line or row, and the byte where the next line begins.
_Item = tuple[str, str | None, int, int, int]


class Corpus:
    """The documents of `inputs`; every iteration starts over and yields the same documents.

    A text file is one document, or several with `split` (see `paragraphs`; "auto" if it is alone).
    `.jsonl` and `.ndjson` have a document a line, `.parquet` one a row; a `.json` file is read as
    JSON Lines if it is named, or has `json_key` in its first line. All but parquet may also end in
    `.gz` or `.zst`. Folders are read recursively, except `__pycache__` and names that start with a
    dot.

    Memory is bounded: a document, or a run of blank lines, of more than `max_document_bytes` is an
    error, and so is a file that decompresses to more than that and to over a thousand times its
    size.

    `total_bytes` and `read_bytes` are of the disk; `skipped` and `place` of the current iteration;
    `start` is where iterations begin.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        json_key: str = "text",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
        partition: tuple[int, int] | None = None,
        split: Split = "never",
    ):
        self.inputs = [str(i) for i in inputs]
        self.json_key = json_key
        self.max_document_bytes = max_document_bytes
        self.partition = partition
        self.skipped = Skipped()
        self.read_bytes = 0
        self.place = self.start = Place()
        self._files: list[File] = []
        problems = [] if inputs else ["no input: pass files or folders"]
        if max_document_bytes < 1:
            problems.append(f"--max-document-bytes {max_document_bytes}: use 1 or more")
        for item in self.inputs:
            try:
                self._files += input_files.expand(item, self.json_key, max_document_bytes)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)
        alone = [file.kind for file in self._files] == ["text"]
        self.is_split = split == "paragraphs" or (split == "auto" and alone)
        self._spans = input_files.spans_of(self._files, *(partition or (1, 1)))
        self.total_bytes = sum(span.stop - span.start for span in self._spans)

    def identity(self) -> list[tuple[str, int, int]]:
        """Return path, size in bytes and time of change (ns) of every file of all partitions."""
        return [(str(f.path), f.size, f.path.stat().st_mtime_ns) for f in self._files]

    def __iter__(self) -> Iterator[Document]:
        first = self.start
        self.skipped = Skipped(first.invalid_utf8, first.empty, list(first.examples))
        documents = first.documents
        done = sum(span.stop - span.start for span in self._spans[: first.file])
        self.read_bytes, self.place = done, first
        for number, span in enumerate(self._spans[first.file :], first.file):
            file, characters = span.file, 0
            after = first if number == first.file else Place()
            with input_files.readable(file.path):
                for name, text, position, item, byte in self._read(span, after):
                    source = printable(name)
                    read = min(position, span.stop) - span.start
                    self.read_bytes = done + max(read, 0)
                    if text is None:
                        self.skipped.invalid_utf8 += 1
                        if len(self.skipped.examples) < EXAMPLES:
                            self.skipped.examples.append(source)
                    elif not (text := text.removeprefix(input_files.BYTE_ORDER_MARK)):
                        self.skipped.empty += 1
                    else:
                        documents += 1
                        characters += len(text)
                        self._expanded(file, characters)
                        counts = (documents, self.skipped.invalid_utf8, self.skipped.empty)
                        examples = tuple(self.skipped.examples)
                        self.place = Place(number, item, byte, *counts, examples)
                        yield Document(text, source)
            done += span.stop - span.start
            self.read_bytes = done
        if not documents:
            count = len(self._spans)
            raise UserError(
                f"no document in {' '.join(self.inputs)}: of {count} file{'s' * (count != 1)}, "
                f"{self.skipped.empty} are empty and {self.skipped.invalid_utf8} are not UTF-8 text"
            )

    def tracked(self, what: str) -> Iterator[Document]:
        """Yield the documents, showing rate and time left on stderr."""
        with progress(what, self.total_bytes, "bytes") as tell:
            for document in self:
                tell(self.read_bytes)
                yield document

    def _expanded(self, file: File, characters: int) -> None:
        """Reject a small file that decompresses without end: real text is not that repetitive."""
        if characters > max(self.max_document_bytes, _RATIO * file.size):
            raise UserError(
                f"{file.path} expands to more than {_RATIO:,} times its {file.size:,} bytes: it is "
                "damaged or very repetitive (to accept it, raise --max-document-bytes of megasink "
                "data)"
            )

    def _read(self, span: Span, after: Place) -> Iterator[_Item]:
        if span.file.kind == "text" and self.is_split:
            yield from self._paragraphs(span.file, after)
        elif span.file.kind == "text":
            if not after.item:
                yield self._text(span.file)
        elif span.file.kind == "parquet":
            yield from self._rows(span.file, after)
        else:
            yield from self._lines(span, after)

    def _text(self, file: File) -> _Item:
        source, most = str(file.path), self.max_document_bytes
        with input_files.open_lines(file.path, file.compression) as (stream, _):
            data = stream.read(min(_HEAD_BYTES, most + 1))
            # NUL is valid UTF-8, but no text file has it: this skips archives in a folder.
            if b"\0" not in data:
                data += stream.read(most + 1 - len(data))
        if b"\0" in data:
            return source, None, file.size, 1, 0
        if len(data) > most:
            raise self._too_long(source)
        return source, _decoded(data), file.size, 1, 0

    def _paragraphs(self, file: File, after: Place) -> Iterator[_Item]:
        all_of_it = self._text(file)
        source, text, *_ = all_of_it
        if not text:
            yield all_of_it
            return
        for number, (document, done) in enumerate(paragraphs(text), 1):
            if number > after.item:
                yield f"{source}¶{number}", document, file.size * done // len(text), number, 0

    def _lines(self, span: Span, after: Place) -> Iterator[_Item]:
        limit, number, blank, byte = self.max_document_bytes, 0, 0, 0
        path, compression = span.file.path, span.file.compression
        with input_files.open_lines(path, compression) as (lines, tell):
            if compression is None and after.item:
                number, byte = after.item, after.byte
                lines.seek(byte)
            elif span.start:
                byte = _next_line(lines, span.start, limit)
            # The line that begins before `stop` belongs to this part as a whole.
            while (compression or byte < span.stop) and (line := lines.readline(limit + 1)):
                number += 1
                source = f"{path}:byte {byte}" if span.start else f"{path}:{number}"
                byte += len(line)
                if len(line) > limit:
                    raise self._too_long(source)
                if compression and number <= after.item:
                    continue
                if number == 1 and not span.start:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    blank += len(line)
                    if blank > limit:
                        raise UserError(
                            f"{source}: more than {limit:,} bytes of blank lines: remove them"
                        )
                    continue
                blank = 0
                text = input_files.text_of(line, source, self.json_key)
                del line  # the consumer may hold the text for long
                yield source, text, tell(), number, byte

    def _rows(self, file: File, after: Place) -> Iterator[_Item]:
        rows = input_files.parquet_rows(file.path, self.json_key, self.max_document_bytes)
        for row, (cell, part) in enumerate(rows, 1):
            if row <= after.item:
                continue
            source = f"{file.path}#{row}"
            if cell is None:
                raise self._too_long(source)
            yield source, _decoded(cell), int(file.size * part), row, 0

    def _too_long(self, source: str) -> UserError:
        return UserError(
            f"{source} is longer than the limit of {self.max_document_bytes:,} bytes per "
            "document: split it, or raise --max-document-bytes of megasink data"
        )


def _next_line(lines: BufferedReader, start: int, limit: int) -> int:
    """Go to the first line that begins at byte `start` or later, and return where it begins."""
    lines.seek(start - 1)
    while (rest := lines.readline(limit)) and not rest.endswith(b"\n"):
        pass
    return lines.tell()


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def default_workers() -> int:
    """Return the number of processors available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


# Of a text, so that a few percent of it are whole documents; between a paragraph and a chapter.
_PARTS = 200
_LEAST, _MOST = 512, 1 << 14
_BLANK = re.compile(r"\n[ \t\r]*\n")
_LINE = re.compile(r"\n")


def paragraphs(text: str) -> Iterator[tuple[str, int]]:
    """Yield documents of a text, and the number of its characters consumed with each."""
    # A document ends at the first blank line after about a 200th of the text (512 to 16,384
    # characters), or at the end of a line if there is none within eight times as much.
    least = min(max(len(text) // _PARTS, _LEAST), _MOST)
    start = 0
    while start < len(text):
        end = _end(text, start, least)
        if document := text[start:end].strip("\r\n"):
            yield document, end
        start = end


def _end(text: str, start: int, least: int) -> int:
    """Return where the document that begins at `start` ends."""
    match = _BLANK.search(text, start + least, start + 8 * least)
    match = match or _LINE.search(text, start + 8 * least)
    return match.end() if match else len(text)
