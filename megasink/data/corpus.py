"""Read documents from files, folders, JSON Lines, parquet and the Python standard library.

The order is fixed: inputs as given, folders by sorted relative path, records in file order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megasink.data.files import STDLIB, File, expand, open_file, readable
from megasink.data.parquet import ParquetReader
from megasink.data.records import text_of
from megasink.errors import ConfigError, UserError
from megasink.progress import progress

__all__ = ["MAX_DOCUMENT_BYTES", "STDLIB", "Corpus", "Document", "Skipped"]

InvalidUtf8 = Literal["skip", "error"]

MAX_DOCUMENT_BYTES = 128 << 20
"""Per text file, line or cell; reading one takes up to ten times as much memory."""
_RATIO = 1000  # gzip reaches 1032, but only for zeros
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, and its origin (`path`, `path:line` or `path#row`).

    The text of a conversation is its record, a JSON object.
    """

    text: str
    source: str


@dataclass
class Skipped:
    """Skipped documents: counts, and the first few sources that are not UTF-8 text."""

    invalid_utf8: int = 0
    empty: int = 0
    examples: list[str] = field(default_factory=list)


# A reader yields: source, text (None if the bytes are not UTF-8), bytes read of the file so far.
_Item = tuple[str, str | None, int]


class Corpus:
    """The documents of `inputs`; every iteration starts over and yields the same documents.

    A file is one document unless its name ends in `.jsonl` or `.ndjson` (one per line) or in
    `.parquet` (one per row). A `.json` file is read as JSON Lines if it is named as an input, or if
    it is in a folder and its first line is an object with `json_key`; otherwise it is text. All but
    parquet may also end in `.gz` or `.zst`. Folders are read recursively, except `__pycache__` and
    names that start with a dot.

    Memory is bounded, whatever a file decompresses to: a document, or a run of blank lines, of
    more than `max_document_bytes` is an error, and so is a file that decompresses to more than that
    and to over a thousand times its size.

    Args:
        inputs: files, folders, or `stdlib:` (see `STDLIB`).
        json_key: the key of a JSON object, or the column of a parquet file, that holds the text
            (default: text), or the messages (default: messages).
        chat: read conversations, one per line or row, as they are: `megasink.data.conversation`
            checks them. Files of text are an error.
        on_invalid_utf8: `skip` counts documents that are not UTF-8 text (or text files with NUL
            bytes) in `skipped`, `error` raises UserError.
        max_document_bytes: maximum size of a text file, line or cell, decompressed.

    Attributes:
        total_bytes: size on disk of all files, in bytes.
        read_bytes: bytes of them that the current iteration has read.
        skipped: what the current iteration has skipped so far.

    Raises:
        ConfigError: inputs that are missing, or are or contain pipes, sockets or devices; one
            message lists all of them.
        UserError: while iterating: a file that cannot be read, a line that is not a JSON object, a
            missing key or column, a document that is too long, or no document at all.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        json_key: str | None = None,
        chat: bool = False,
        on_invalid_utf8: InvalidUtf8 = "skip",
        max_document_bytes: int = MAX_DOCUMENT_BYTES,
    ):
        self.inputs = [str(i) for i in inputs]
        self.chat = chat
        self.json_key = json_key or ("messages" if chat else "text")
        self.on_invalid_utf8 = on_invalid_utf8
        self.max_document_bytes = max_document_bytes
        self.skipped = Skipped()
        self.read_bytes = 0
        self._files: list[File] = []
        problems = [] if inputs else ["no input: name files, folders or `stdlib:`"]
        if max_document_bytes < 1:
            problems.append(f"--max-document-bytes {max_document_bytes}: at least 1")
        for item in self.inputs:
            try:
                self._files += expand(item, self.json_key, max_document_bytes)
            except UserError as error:
                problems.append(str(error))
        texts = [str(f.path) for f in self._files if chat and f.kind == "text"]
        if texts:
            problems.append(
                f"{texts[0]}{f' and {len(texts) - 1} others' if texts[1:] else ''}: conversations "
                "are read from .jsonl (also .gz, .zst) and .parquet files: name those"
            )
        if problems:
            raise ConfigError(problems)
        self.total_bytes = sum(f.size for f in self._files)

    def __iter__(self) -> Iterator[Document]:
        self.skipped = Skipped()
        self.read_bytes = done = documents = 0
        with ParquetReader(self.max_document_bytes) as parquet:
            for file in self._files:
                characters = 0
                with readable(file.path):
                    for source, text, position in self._read(file, parquet):
                        self.read_bytes = done + min(position, file.size)
                        if text is None:
                            self._invalid(source)
                        elif not text:
                            self.skipped.empty += 1
                        else:
                            documents += 1
                            characters += len(text)
                            self._expanded(file, characters)
                            yield Document(text, source)
                done += file.size
                self.read_bytes = done
        if not documents:
            raise UserError(
                f"no document in {' '.join(self.inputs)}: {len(self._files)} files, "
                f"{self.skipped.empty} empty and {self.skipped.invalid_utf8} not UTF-8 text"
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
                f"{file.path} holds more than {_RATIO:,} times its {file.size:,} bytes: it is "
                "damaged or very repetitive (to accept it, raise --max-document-bytes of megasink "
                "data)"
            )

    def _read(self, file: File, parquet: ParquetReader) -> Iterator[_Item]:
        if file.kind == "text":
            yield self._text(file)
        elif file.kind == "parquet":
            yield from self._rows(file, parquet)
        else:
            yield from self._lines(file)

    def _text(self, file: File) -> _Item:
        source = str(file.path)
        with open_file(file.path, file.compression) as (stream, _):
            data = stream.read(self.max_document_bytes + 1)
        # NUL is valid UTF-8, but no text file has it: this skips archives in a folder.
        if b"\0" in data:
            return source, None, file.size
        if len(data) > self.max_document_bytes:
            raise self._too_long(source)
        return source, _decoded(data), file.size

    def _lines(self, file: File) -> Iterator[_Item]:
        limit, number, blank = self.max_document_bytes, 0, 0
        with open_file(file.path, file.compression) as (lines, tell):
            while line := lines.readline(limit + 1):
                number += 1
                source = f"{file.path}:{number}"
                if len(line) > limit:
                    raise self._too_long(source)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    blank += len(line)
                    if blank > limit:
                        raise UserError(f"{source}: more than {limit:,} bytes of blank lines")
                    continue
                blank = 0
                text = _decoded(line) if self.chat else text_of(line, source, self.json_key)
                yield source, text, tell()

    def _rows(self, file: File, parquet: ParquetReader) -> Iterator[_Item]:
        rows = parquet.rows(file.path, self.json_key, chat=self.chat)
        for row, (cell, part) in enumerate(rows, 1):
            source = f"{file.path}#{row}"
            if cell is None:
                raise self._too_long(source)
            yield source, _decoded(cell), int(file.size * part)

    def _too_long(self, source: str) -> UserError:
        return UserError(
            f"{source} is longer than the {self.max_document_bytes:,} bytes that a document may "
            "have: split it, or raise --max-document-bytes of megasink data"
        )

    def _invalid(self, source: str) -> None:
        if self.on_invalid_utf8 == "error":
            raise UserError(
                f"{source} is not UTF-8 text: convert it, or pass --on-invalid-utf8 skip"
            )
        self.skipped.invalid_utf8 += 1
        if len(self.skipped.examples) < _EXAMPLES:
            self.skipped.examples.append(source)


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
