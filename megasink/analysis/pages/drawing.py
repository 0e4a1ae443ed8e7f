"""Definition of a report figure. A metric's figure comes from its record (figures_metrics.py); add
any other one to the `DRAWINGS` of a figures file."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """One kind of figure.

    Attributes:
        name: name of its file.
        section: section of the page, one of `SECTIONS`.
        title, caption: formula, unit and rows of the papers.
        draw: creates a matplotlib figure of all analyses; None if they lack the numbers.
        by_model: whether each model gets its own figure; `draw` then takes one analysis.
    """

    name: str
    section: str
    title: str
    caption: str
    draw: Callable[[Any], Any]
    by_model: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawn figure.

    Attributes:
        name: name of its file, without the extension.
        model: the model shown; empty for a figure of all models.
        files: "png", and "pdf" if requested -> the bytes.
    """

    name: str
    drawing: Drawing
    model: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
