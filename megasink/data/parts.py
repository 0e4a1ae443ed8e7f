"""Places in a corpus, and its division over machines."""

from dataclasses import dataclass
from typing import NamedTuple

from megasink.data.files import File
from megasink.errors import ConfigError


class Place(NamedTuple):
    """A position in a corpus: everything before it is done."""

    file: int = 0  # number of the file
    item: int = 0  # its lines, rows or documents; 1 after a text file that is one document
    byte: int = 0  # of a file that is read by lines, uncompressed: where the next line begins
    documents: int = 0  # documents so far
    invalid_utf8: int = 0  # documents so far that are not UTF-8 text
    empty: int = 0  # empty ones
    examples: tuple[str, ...] = ()  # sources of the first of these


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a file: lines that begin at byte `start` or later, and before byte `stop`."""

    file: File
    start: int
    stop: int


def is_divisible(file: File) -> bool:
    """Return whether a file can be read from the middle."""
    return file.kind == "lines" and file.compression is None


def spans_of(files: list[File], part: int, parts: int) -> list[Span]:
    """Return part `part` (from 1 on) of `parts` of about equal bytes, in order.

    Uncompressed JSON Lines are divided between lines; other files belong to the part in which they
    begin.
    """
    if parts == 1:
        return [Span(file, 0, file.size) for file in files]
    total = sum(file.size for file in files)
    given: list[list[Span]] = [[] for _ in range(parts)]
    begin = 0
    for file in files:
        end = begin + file.size
        for number, spans in enumerate(given):
            low, high = total * number // parts, total * (number + 1) // parts
            if is_divisible(file):
                start, stop = max(begin, low), min(end, high)
                if start < stop:
                    spans.append(Span(file, start - begin, stop - begin))
            elif low <= begin < high or (begin == high and number == parts - 1):
                spans.append(Span(file, 0, file.size))
        begin = end
    if not all(given):
        raise ConfigError(
            f"--partition {part}/{parts}: only {sum(map(bool, given))} of the {parts} parts "
            "would have data, because only uncompressed JSON Lines are divided within a file: "
            "use fewer parts"
        )
    return given[part - 1]
