"""Documents out of one long text: whole paragraphs, so that some can be left for validation."""

import re
from collections.abc import Iterator

# Of a text, so that a share of a few percent is documents; between a paragraph and a chapter.
_PARTS = 200
_LEAST, _MOST = 512, 1 << 14
_BLANK = re.compile(r"\n[ \t\r]*\n")
_LINE = re.compile(r"\n")


def paragraphs(text: str) -> Iterator[tuple[str, int]]:
    """Yield documents of a text, and how many of its characters are done with each.

    A document ends at the first blank line after about a 200th of the text (512 to 16,384
    characters), or where there is none in eight times as much, at the end of a line.
    """
    least = min(max(len(text) // _PARTS, _LEAST), _MOST)
    start = 0
    while start < len(text):
        end = _end(text, start, least)
        if document := text[start:end].strip("\r\n"):
            yield document, end
        start = end


def _end(text: str, start: int, least: int) -> int:
    """Return where the document that begins at `start` ends."""
    found = _BLANK.search(text, start + least, start + 8 * least)
    found = found or _LINE.search(text, start + 8 * least)
    return found.end() if found else len(text)
