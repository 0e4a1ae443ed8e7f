"""Read one JSON Lines record, with bounded memory."""

import codecs
import itertools
import json
import re
from typing import Any

from megasink.data.long_text import BYTE_ORDER_MARK, WHOLE_BYTES, HeldText
from megasink.errors import UserError

_VALUES = 1 << 22
"""Maximum number of values per record; parsed, each takes up to some 200 bytes of memory."""
_BOM = BYTE_ORDER_MARK.encode()
_SURROGATE = re.compile("[\ud800-\udfff]")  # alone: there is no UTF-8 of it
_STRING_OR_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{,]', re.DOTALL)


def text_of(line: bytes, source: str, key: str) -> str | HeldText | None:
    """Return the text of a record: "" for null, None if it is not UTF-8.

    Parsed at once, a long line is in memory six times and more.

    Args:
        line: one line of a file.
        source: path and line number, for errors.
        key: key that holds the text.

    Raises:
        UserError: errors of `record_of`, or the key holds no string.
    """
    if len(line) > WHOLE_BYTES and (held := _held_text(line, key)) is not None:
        return held
    record = record_of(line, source, key)
    if record is None:
        return None
    text = record[key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{source}: {key!r} holds a {type(text).__name__}, not a string")
    return None if _SURROGATE.search(text) else text


def _held_text(line: bytes, key: str) -> HeldText | None:
    """Return the text of a long line; None if the line must be read as a whole: it is wrong, or
    has no text."""
    import pyarrow as pa
    from pyarrow import json as reader

    if _values_beyond(line):
        return None
    schema = pa.schema([(key, pa.string())])
    parse = reader.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        _count(line)  # Arrow reads what is not UTF-8, too
        read = reader.ReadOptions(use_threads=False, block_size=len(line) + 1)
        column = reader.read_json(pa.BufferReader(line), read, parse).column(0)
        (value,) = column
        if not value.is_valid:
            return None
        content = memoryview(value.as_buffer()).cast("B")
        content = content[len(_BOM) if content[: len(_BOM)] == _BOM else 0 :]
        return HeldText(content, _count(content))
    except (ValueError, OverflowError):  # also Arrow's own, and UnicodeDecodeError
        return None


def _count(content: bytes | memoryview) -> int:
    """Return the characters of UTF-8 that is never whole in memory.

    Raises:
        UnicodeDecodeError: it is none.
    """
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 1 << 20
    parts = range(0, len(content), size)
    count = sum(len(decoder.decode(content[start : start + size])) for start in parts)
    return count + len(decoder.decode(b"", final=True))


def record_of(line: bytes, source: str, key: str) -> dict[str, Any] | None:
    """Return a record, an object with `key`; None if it is not UTF-8.

    Raises:
        UserError: no JSON object, no such key, or a record that is too deep or too large.
    """
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
        raise UserError(f"{source} holds a JSON {type(record).__name__}, not an object")
    if key not in record:
        raise UserError(f"{source} has no key {key!r}: pass --json-key, one of {_keys(record)}")
    return record


def _values_beyond(line: bytes) -> bool:
    """Return whether a line has more than `_VALUES` values; commas inside strings do not count."""
    if len(line) <= _VALUES or sum(map(line.count, (b",", b"[", b"{"))) <= _VALUES:
        return False
    found = (m for m in _STRING_OR_VALUE.finditer(line) if m.end() - m.start() == 1)
    return next(itertools.islice(found, _VALUES, None), None) is not None


def _keys(record: dict[str, object]) -> str:
    shown = sorted(record)[:10]
    return f"{shown}{' and others' if len(record) > len(shown) else ''}"
