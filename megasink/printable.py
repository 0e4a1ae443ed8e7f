"""Text from outside (names of files, models, tokens, data sets) on its way to a terminal or a log.

An escape sequence in a name moves the cursor, renames the window or types for the user; a mark of
direction shows a name backwards; a line feed makes one line of a log two.
"""

import re
import unicodedata

# Control characters, half characters (bytes of a file name that are no UTF-8: printing them
# fails), line and paragraph separators, and what is invisible but joins no letters.
_CATEGORIES = {"Cc", "Cs", "Zl", "Zp", "Cf"}
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with Python's escapes for what a terminal would obey, or not show.

    Args:
        keep: control characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep + _JOINERS or unicodedata.category(character) not in _CATEGORIES
        else ascii(character)[1:-1]
        for character in text
    )


def one_line(text: str) -> str:
    """As :func:`printable`, in one line but for a numbered list (of a ConfigError)."""
    return re.sub(r"\n(?!  \d+\. )", r"\\n", printable(text.rstrip()))


def say(text: str) -> None:
    """Print it."""
    print(printable(text), flush=True)
