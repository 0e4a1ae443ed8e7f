"""Read records of JSON Lines and parquet, with bounded memory."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.files.json_file import kind_of

_VALUES = 1 << 22
"""Maximum number of values per record; parsed, each takes up to some 200 bytes of memory."""
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
        raise UserError(f"{source}: {key!r} holds a JSON {kind_of(text)}, not a string")
    return None if _SURROGATE.search(text) else text


def record_of(line: bytes, source: str, key: str) -> dict[str, Any] | None:
    """Return a record, an object with `key`; None if it is not UTF-8."""
    if _values_beyond(line):
        raise UserError(
            f"{source} holds more than {_VALUES:,} values: each line must be one document"
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
        raise UserError(f"{source} holds a JSON {kind_of(record)}, not an object")
    if key not in record:
        raise UserError(f"{source} has no key {key!r}: pass --json-key, one of {_keys(record)}")
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
        raise UserError(f"{path} has no column {key!r}: pass --json-key, one of {sorted(names)}")
    kind = file.schema_arrow.field(key).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
        raise UserError(f"{path}: column {key!r} holds {kind}, not strings")
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
