"""Escape untrusted text, such as names, which could steer a terminal or split a log line."""

import re
import shlex
import unicodedata

# Control characters, surrogates (non-UTF-8 bytes of a file name, which cannot be printed), line and
# paragraph separators, and invisible format characters other than joiners.
_CATEGORIES = {"Cc", "Cs", "Zl", "Zp", "Cf"}
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def printable(text: str, keep: str = "\n\t") -> str:
    """Replace control and invisible characters, except `keep`, with Python escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep + _JOINERS or unicodedata.category(character) not in _CATEGORIES
        else ascii(character)[1:-1]
        for character in text
    )


def one_line(text: str) -> str:
    """Return :func:`printable` text on one line, except for a ConfigError's numbered list."""
    return re.sub(r"\n(?!  \d+\. )", r"\\n", printable(text.rstrip()))


def say(text: str) -> None:
    """Print text after escaping it with `printable`."""
    print(printable(text), flush=True)


def say_next(what: str, *words: object) -> None:
    """Print the next command, ready to paste, and its purpose."""
    say(f"next, {what}: megasink {shlex.join(map(str, words))}")
