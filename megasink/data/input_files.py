"""Resolve inputs to files, open them without blocking, and read records in bounded memory."""

import itertools
import json
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from megasink.errors import ConfigError, UserError
from megasink.files.json_file import NOT_REGULAR, kind_of, open_file

BYTE_ORDER_MARK = "\ufeff"
"""Byte order mark, which some programs write before a text, even in UTF-8."""

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_KINDS = NOT_REGULAR | {stat.S_IFDIR: "a link to a folder"}


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus: its format, and its size on disk in bytes."""

    path: Path
    kind: Literal["text", "lines", "parquet"]
    compression: str | None
    size: int


def expand(item: str, json_key: str, max_bytes: int) -> list[File]:
    """Return the files of an input; a .json file is JSON Lines if its first line has the key."""
    path, named = Path(item), False
    if path.is_dir():
        paths = _walk(path)
    elif path.is_file():
        paths, named = [path], True
    else:
        state = "is not a regular file" if path.exists() else "does not exist"
        raise UserError(f"input {item} {state}: pass a file or a folder")
    return [_classify(p, json_key, max_bytes, named=named) for p in paths]


def _walk(root: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"folder {error.filename} cannot be read: {error.strerror}")

    paths = []
    for folder, subfolders, names in root.walk(on_error=refuse):
        subfolders[:] = [s for s in subfolders if s != "__pycache__" and not s.startswith(".")]
        paths += [folder / n for n in names if not n.startswith(".")]
    for path in paths:
        target = path.resolve() if path.is_symlink() else None
        if target and target.is_file() and not target.is_relative_to(root.resolve()):
            raise UserError(
                f"{path} is a link to {target}, outside {root}: remove it, or pass the file itself "
                "as an input"
            )
    return sorted(paths, key=lambda p: p.relative_to(root).parts)


def _classify(path: Path, json_key: str, max_bytes: int, *, named: bool) -> File:
    with readable(path):
        facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        kind = _KINDS.get(stat.S_IFMT(facts.st_mode), "not a file")
        raise UserError(f"{path} is {kind}: remove it from the folder, or pass the files instead")
    name = path.name.lower()
    compression = _COMPRESSION.get(Path(name).suffix)
    inner = Path(name).stem if compression else name
    if inner.endswith(_JSON_LINES) and (
        named
        or not inner.endswith(".json")
        or _first_line_has(path, compression, json_key, max_bytes)
    ):
        return File(path, "lines", compression, facts.st_size)
    if name.endswith(".parquet"):
        return File(path, "parquet", None, facts.st_size)
    return File(path, "text", compression, facts.st_size)


def _first_line_has(path: Path, compression: str | None, key: str, max_bytes: int) -> bool:
    with readable(path), open_lines(path, compression) as (lines, _):
        try:
            record = json.loads(lines.readline(max_bytes))
        except (ValueError, RecursionError):
            return False
    return isinstance(record, dict) and key in record


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError raised inside the context into a one-line error about `path`."""
    try:
        yield
    except OSError as error:
        # pyarrow raises OSError without strerror, also for a damaged .gz or .zst
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def open_lines(
    path: Path, compression: str | None
) -> Iterator[tuple[BufferedReader, Callable[[], int]]]:
    """Yield the decompressed stream of `path`, and a function that returns the file offset."""
    with open_file(path) as raw:
        if compression is None:
            yield cast("BufferedReader", raw), raw.tell
            return
        import pyarrow as pa

        # pyarrow rejects a truncated zstd stream; zstandard's own reader silently ends there.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)
        yield BufferedReader(cast("BufferedReader", stream)), raw.tell


class Place(NamedTuple):
    """A position in a corpus: everything before it is done."""

    file: int = 0  # number of the file
    item: int = 0  # its lines, rows or documents; 1 after a text file that is one document
    byte: int = 0  # of a file that is read by lines, uncompressed: where the next line begins
    documents: int = 0  # documents so far
    invalid_utf8: int = 0  # documents so far that are not UTF-8 text
    empty: int = 0  # empty ones
    examples: tuple[str, ...] = ()  # sources of the first of these


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file: lines that begin at byte `start` or later, and before byte `stop`."""

    file: File
    start: int
    stop: int


def spans_of(files: list[File], part: int, parts: int) -> list[Span]:
    """Return part `part` (from 1 on) of `parts` of about equal bytes, in order."""
    # Only uncompressed JSON Lines are divided; other files belong to the part in which they begin.
    if parts == 1:
        return [Span(file, 0, file.size) for file in files]
    total = sum(file.size for file in files)
    given: list[list[Span]] = [[] for _ in range(parts)]
    begin = 0
    for file in files:
        end = begin + file.size
        for number, spans in enumerate(given):
            low, high = total * number // parts, total * (number + 1) // parts
            if file.kind == "lines" and file.compression is None:
                start, stop = max(begin, low), min(end, high)
                if start < stop:
                    spans.append(Span(file, start - begin, stop - begin))
            elif low <= begin < high or (begin == high and number == parts - 1):
                spans.append(Span(file, 0, file.size))
        begin = end
    if not all(given):
        raise ConfigError(
            f"--partition {part}/{parts}: only {sum(map(bool, given))} of the {parts} parts "
            "would have data, because only uncompressed JSON Lines are divided within a file: "
            "use fewer parts"
        )
    return given[part - 1]


_VALUES = 1 << 22
"""Maximum number of values per record. A parsed value takes up to about 200 bytes of memory."""
_SURROGATE = re.compile("[\ud800-\udfff]")  # a lone surrogate has no UTF-8 form
_STRING_OR_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{,]', re.DOTALL)


def text_of(line: bytes, source: str, key: str) -> str | None:
    """Return the text of a record: "" for null, None if it is not UTF-8; `source` is for errors."""
    record = record_of(line, source, key)
    if record is None:
        return None
    text = record[key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{source}: {key!r} is a JSON {kind_of(text)}, not a string")
    return None if _SURROGATE.search(text) else text


def record_of(line: bytes, source: str, key: str) -> dict[str, Any] | None:
    """Return a record, an object with `key`; None if it is not UTF-8."""
    if _values_beyond(line):
        raise UserError(
            f"{source} has more than {_VALUES:,} values: each line must be one document"
        )
    try:
        decoded = line.decode("utf-8")
    except UnicodeDecodeError:
        return None
    try:
        record = json.loads(decoded)
    except ValueError as error:
        raise UserError(
            f"{source} is not valid JSON ({error}): each line must be one JSON object"
        ) from error
    except RecursionError:
        raise UserError(f"{source} is nested too deeply: each line must be one document") from None
    if not isinstance(record, dict):
        raise UserError(f"{source} is a JSON {kind_of(record)}, not an object")
    if key not in record:
        raise UserError(f"{source} has no key {key!r}: pass --json-key with one of {_keys(record)}")
    return record


def _values_beyond(line: bytes) -> bool:
    """Return whether a line has more than `_VALUES` values; commas inside strings do not count."""
    if len(line) <= _VALUES or sum(map(line.count, (b",", b"[", b"{"))) <= _VALUES:
        return False
    single_characters = (m for m in _STRING_OR_VALUE.finditer(line) if m.end() - m.start() == 1)
    return next(itertools.islice(single_characters, _VALUES, None), None) is not None


def _keys(record: dict[str, object]) -> str:
    shown = sorted(record)[:10]
    return f"{shown}{' and others' if len(record) > len(shown) else ''}"


_BUFFER = 1 << 20  # of a column that is read; pages of it are read as they are needed
_SLACK = 1 << 20


def parquet_rows(path: Path, key: str, max_bytes: int) -> Iterator[tuple[bytes | None, float]]:
    """Yield the cells of column `key` (b"" for null, None for a longer one), and the share read."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            _check(file, path, key, max_bytes)
            total = file.metadata.num_rows
            # One row: a batch repeats a value that the file may hold once.
            batches = file.iter_batches(1, columns=[key], use_threads=False)
            for number, batch in enumerate(batches, 1):
                cell = _buffer(batch.column(0)[0])
                is_long = cell is not None and cell.size > max_bytes
                content = b"" if cell is None else None if is_long else cell.to_pybytes()
                yield content, number / total
    except UserError:
        raise
    except Exception as error:  # Arrow raises nearly anything on a damaged file
        if isinstance(error, OSError) and error.strerror:
            raise  # of the file system
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable parquet file: {reason}") from error


def _check(file: Any, path: Path, key: str, max_bytes: int) -> None:
    import pyarrow as pa

    names = file.schema_arrow.names
    if key not in names:
        raise UserError(
            f"{path} has no column {key!r}: pass --json-key with one of {sorted(names)}"
        )
    kind = file.schema_arrow.field(key).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
        raise UserError(f"{path}: column {key!r} contains {kind}, not strings")
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            # A page of one cell would be in memory before its size is known.
            most = 2 * max_bytes * column.num_values + _SLACK
            if column.path_in_schema == key and column.total_uncompressed_size > most:
                raise UserError(
                    f"{path}: cells of column {key!r} are longer than the limit of {max_bytes:,} "
                    "bytes per document: split them, or raise --max-document-bytes"
                )


def _buffer(value: Any) -> Any:
    """Return the bytes of a string, or None for null."""
    import pyarrow as pa

    return (value.value if isinstance(value, pa.DictionaryScalar) else value).as_buffer()
