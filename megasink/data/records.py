"""Read one JSON Lines record, with bounded memory."""

import codecs
import itertools
import json
import re
import secrets
from typing import Any

from megasink.data.long_text import BYTE_ORDER_MARK, WHOLE_BYTES, HeldText
from megasink.errors import UserError

_VALUES = 1 << 22
"""Maximum number of values per record; parsed, each takes up to some 200 bytes of memory."""
_SURROGATE = re.compile("[\ud800-\udfff]")  # alone: there is no UTF-8 of it
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_LONG_STRING = 1 << 20  # bytes
# So much of a string that no escape, nor a pair of them, is cut.
_PART = re.compile(
    rb"(?:[^\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u])"
    rb"{1,1048576}+",
    re.DOTALL,
)
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
    if len(line) > WHOLE_BYTES and (held := _held_text(line, source, key)) is not None:
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


def _held_text(line: bytes, source: str, key: str) -> HeldText | None:
    """Return the text of a long line; None if the line must be read as a whole: it is wrong, or
    its length is not in the text."""
    token = secrets.token_hex(16)
    spans: list[tuple[int, int]] = []
    short: list[bytes] = []
    end = 0
    for found in _STRING.finditer(line):
        if found.end() - found.start() > _LONG_STRING:
            short += [line[end : found.start()], f'"{token}{len(spans)}"'.encode()]
            spans.append((found.start() + 1, found.end() - 1))
            end = found.end()
    if len(line) - sum(stop - start for start, stop in spans) > WHOLE_BYTES:
        return None
    try:
        record = record_of(b"".join([*short, line[end:]]), source, key)
        text = (record or {}).get(key)
        if not isinstance(text, str) or not text.startswith(token):
            return None
        wanted = int(text.removeprefix(token))
        # The others must be JSON too; their texts are not kept.
        texts = [_unescaped(line, *span, keep=i == wanted) for i, span in enumerate(spans)]
    except (UserError, ValueError):
        return None
    return texts[wanted]


def _unescaped(line: bytes, start: int, stop: int, *, keep: bool) -> HeldText:
    """Return the text between the quotes of a JSON string.

    Raises:
        ValueError: it is not JSON or not UTF-8, or has no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    content, characters = bytearray(), 0
    while start < stop:
        part = _PART.match(line, start, stop)
        if part is None:
            raise ValueError("an escape is cut short")
        start = part.end()
        text = json.loads(f'"{decoder.decode(part[0], final=start == stop)}"')
        if not characters:
            text = text.removeprefix(BYTE_ORDER_MARK)
        characters += len(text)
        if keep:
            content += text.encode()
    return HeldText(content, characters)


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
