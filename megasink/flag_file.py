"""Flags of `megasink train` in TOML files, by flat name, as recipes and grids hold them."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasink.errors import UserError

Flags = dict[str, Any]
"""Flags of `megasink train` by flat name: a number, a string, true, false or a list."""


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: it is not TOML.
        OSError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line; false leaves a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def form_problems(name: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with the form of a flag in a file; each continues the flag's name."""
    if name.startswith("-"):
        yield f": write {name.lstrip('-')}, without dashes"
    values = value if isinstance(value, list) else [value]
    if not all(type(entry) in (int, float, str, bool) for entry in values):
        yield f" is {value!r}: give a number, a string, true, false or a list"
    elif isinstance(value, list) and (not value or bool in map(type, values)):
        yield f" is {value!r}: give a list of numbers or strings"


def toml_lines(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags as the lines of a file; `read_toml` returns the same flags."""
    for name, value in flags.items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        yield f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """Return a basic string: control characters, quotes and backslashes are escaped."""
    body = "".join(
        f"\\{c}" if c in '"\\' else f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c
        for c in value
    )
    return f'"{body}"'
