"""Mistakes of a command line, of all commands: the table of mistakes.toml."""

import tomllib
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
BEGINNINGS: dict[str, str] = _TABLE["beginnings"]
SLOW = frozenset(_TABLE["slow"])
"""Names of mistakes that are answered after a slow import."""


def _whole(line: str) -> str:
    """The line, with the beginning that its first word stands for."""
    first, space, rest = line.partition(" ")
    return BEGINNINGS.get(first, first) + space + rest


MISTAKES: dict[str, tuple[str, ...]] = {
    name: (_whole(line), *says) for name, (line, *says) in _TABLE["mistakes"].items()
}
"""{name: (command line, what the answer must hold)}."""
