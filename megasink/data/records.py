"""One line of JSON Lines to its text, with bounded memory."""

import itertools
import json
import re

from megasink.errors import UserError

_VALUES = 1 << 22
"""Values of one record at most: parsed, each takes up to some 200 bytes of memory."""
_STRING_OR_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{,]', re.DOTALL)


def text_of(line: bytes, source: str, key: str) -> str | None:
    """The text of a record: "" for null, None where it is not UTF-8.

    Args:
        line: of a file.
        source: path and number of the line, for errors.
        key: of the text.

    Raises:
        UserError: no JSON object, one without the key, or one that is too deep or too large.
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
    return _checked(record[key], source, key)


def _values_beyond(line: bytes) -> bool:
    """Whether a line has more values than memory is for; commas inside of strings do not count."""
    if len(line) <= _VALUES or sum(map(line.count, (b",", b"[", b"{"))) <= _VALUES:
        return False
    found = (m for m in _STRING_OR_VALUE.finditer(line) if m.end() - m.start() == 1)
    return next(itertools.islice(found, _VALUES, None), None) is not None


def _keys(record: dict[str, object]) -> str:
    shown = sorted(record)[:10]
    return f"{shown}{' and others' if len(record) > len(shown) else ''}"


def _checked(value: object, source: str, key: str) -> str | None:
    """A record's text: "" for null, None for text with lone surrogates, which UTF-8 has not."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{source}: {key!r} holds a {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return value
