"""What a figure of the report is. A metric's is made from its record (figures_metrics.py); for
another one, write it into the `DRAWINGS` of a figures file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megasink.report.analysis import Analysis

SECTIONS = ("Sinks", "Heads", "Hidden states", "Geometry", "Other metrics", "Between models")
"""Of the page, in its order."""


@dataclass(frozen=True)
class Drawing:
    """One kind of figure.

    Attributes:
        name: of its file.
        section: of the page, one of `SECTIONS`.
        title, caption: what is shown: formula, unit and rows of the papers.
        draw: makes a matplotlib figure of the analyses; None where they lack the numbers.
        by_model: a figure for each model; else one for all of them.
    """

    name: str
    section: str
    title: str
    caption: str
    draw: Callable[[Sequence[Analysis]], Any]
    by_model: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: of its file, without the ending.
        files: "png", and "pdf" where asked for, to the bytes.
        model: whose figure it is; empty for one of all models.
    """

    name: str
    drawing: Drawing
    files: dict[str, bytes]
    model: str
