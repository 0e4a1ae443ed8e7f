"""Read one JSON Lines record, with bounded memory."""

import itertools
import json
import re
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
