"""Documents out of one long text: whole paragraphs, so that some can be left for validation."""

import re
from collections.abc import Iterable, Iterator

# Of a text, so that a share of a few percent is documents; between a paragraph and a chapter.
_PARTS = 200
_LEAST, _MOST = 512, 1 << 14
_BLANK = re.compile(r"\n[ \t\r]*\n")
_LINE = re.compile(r"\n")


def paragraphs(pieces: Iterable[str], characters: int) -> Iterator[tuple[str, int]]:
    """Yield documents of a text, and how many of its characters are done with each.

    A document ends at the first blank line after about a 200th of the text (512 to 16,384
    characters), or where there is none in eight times as much, at the end of a line.

    Args:
        pieces: the text, in order.
        characters: of all of it.
    """
    least = min(max(characters // _PARTS, _LEAST), _MOST)
    text, done = "", 0
    for piece in pieces:
        text += piece
        start = 0
        while (end := _end(text, start, least)) is not None:
            if document := text[start:end].strip("\r\n"):
                yield document, done + end
            start = end
        text, done = text[start:], done + start
    while text:
        end = _end(text, 0, least, is_last=True) or len(text)
        if document := text[:end].strip("\r\n"):
            yield document, done + end
        text, done = text[end:], done + end


def _end(text: str, start: int, least: int, *, is_last: bool = False) -> int | None:
    """Return where the document that begins at `start` ends; None if that is not in the text."""
    if found := _BLANK.search(text, start + least, start + 8 * least):
        return found.end()
    if not is_last and len(text) - start < 8 * least:
        return None
    found = _LINE.search(text, start + 8 * least)
    return found.end() if found else None
