"""Definition of a report figure.

A metric's figure comes from its record (figures_metrics.py). Add others to the `DRAWINGS` of a
figures file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megasink.analysis.pages.numbers import Numbers, numbers_of
from megasink.figures.style import rendered

OPENING = "Summary"
SECTIONS = (
    OPENING,
    "Sinks",
    "Heads",
    "Hidden states",
    "Geometry",
    "Other metrics",
    "Between models",
)
"""Sections of the page, in order."""


@dataclass(frozen=True)
class Drawing:
    """One kind of figure."""

    name: str  # name of its file
    section: str  # section of the page, one of `SECTIONS`
    # title, caption: formula, unit and rows of the papers.
    title: str
    caption: str
    # Creates a matplotlib figure of all analyses; None if they lack the numbers.
    draw: Callable[[Any], Any]
    by_model: bool = False  # whether each model gets its own figure; `draw` then takes one analysis
    # Description in words, from the argument of `draw`; by default its extremes.
    finding: Callable[[Any], str] | None = None


@dataclass(frozen=True)
class Picture:
    """A drawn figure."""

    name: str  # name of its file, without the extension
    title: str
    caption: str
    files: dict[str, bytes]  # "png", and "pdf" if requested -> the bytes
    numbers: Numbers  # what it shows
    section: str = ""  # of the page of an analysis
    model: str = ""  # the model shown; empty for a figure of all models
    finding: str = ""


def picture_of(
    figure: Any,
    name: str,
    title: str,
    caption: str,
    *,
    kinds: Sequence[str] = ("png",),
    comment: str | None = None,
    **of: str,
) -> Picture:
    """Return the picture of a figure of matplotlib."""
    files = {kind: rendered(figure, kind, comment) for kind in kinds}
    return Picture(name, title, caption, files, numbers_of(figure), **of)


def page_files(page: str, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the files of a page: report.html and figures/."""
    return {"report.html": page} | {
        f"figures/{picture.name}.{kind}": content
        for picture in pictures
        for kind, content in picture.files.items()
    }
