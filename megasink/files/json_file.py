"""Read small untrusted files, mostly JSON, with a one-line error for any problem."""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megasink.errors import UserError

_KINDS = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
_KINDS |= {int: "number", float: "number"}
_LARGEST = 1 << 30  # bytes; results.json of a 100-layer model is about 10 MB
NOT_REGULAR = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_file(path: Path, *, appending: bool = False) -> BinaryIO:
    """Open a regular file to read or append; do not block on a pipe of that name."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if appending else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise UserError(f"{path} is {NOT_REGULAR.get(kind, 'something else')}, not a regular file")
    return os.fdopen(descriptor, "ab" if appending else "rb")


def read_text(path: Path, most: int = _LARGEST, errors: str = "strict") -> str:
    """Return the text of a file of at most this many bytes."""
    try:
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size > most:
                raise UserError(f"{path} is larger than the limit of {most:,} bytes")
            return file.read(most).decode(errors=errors)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    value = read_value(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} contains a JSON {kind_of(value)}, not an object")
    return value


def kind_of(value: Any) -> str:
    """Return the JSON name of a value's type; also for parquet's types."""
    return _KINDS.get(type(value), type(value).__name__)


def read_value(path: Path) -> Any:
    """Return the JSON value in a file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise UserError(f"{path} cannot be read: the JSON is nested too deeply") from None


def objects_in(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the lines of a file; a kill may have cut one off."""
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
