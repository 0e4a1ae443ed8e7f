"""Figures of pages: a function with a caption, its picture, and the numbers behind it.

A metric's figure comes from its record (metric_figures.py). Others are functions with `@drawing`,
whose docstring is the caption.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from megasink.figures.recorded_panels import Shown
from megasink.figures.style import rendered, styled

MOST_CELLS = 6000
"""Maximum number of values of one picture on a page: a map of 80 layers by 64 heads fits."""
_DOT = 0.009  # half of a mark's width, as a share of the picture's


class Mark(NamedTuple):
    """A place in the picture and its label."""

    # left, top, right, bottom: shares of the picture's width and height.
    left: float
    top: float
    right: float
    bottom: float
    text: str


class Table(NamedTuple):
    """The numbers of one panel; the first column names the rows."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a picture; `is_whole` unless there are more than `MOST_CELLS`."""

    marks: list[Mark] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    is_whole: bool = True


def numbers_of(figure: Any) -> Numbers:
    """Return the numbers of a rendered figure; scattered points have none."""
    marks: list[Mark] = []
    tables: list[Table] = []
    is_whole, cells = True, 0
    for axis in figure.axes:
        if (of := getattr(axis, "shown", None)) is None:
            continue
        for table, boxes in (*_of_maps(of), *_of_series(of)):
            cells += len(table.rows) * (len(table.head) - 1)
            if cells > MOST_CELLS:
                is_whole = False
                break
            tables.append(table)
            marks += [_mark(axis, box, text) for box, text in boxes]
    return Numbers(marks, tables, is_whole)


def _mark(axis: Any, box: Any, text: str) -> Mark:
    """Return a mark over a box of the axis's coordinates; a dot around a point."""
    corners = axis.transData.transform(np.reshape(box, (-1, 2)))
    if len(corners) == 1:
        dot = _DOT * axis.figure.bbox.width
        corners = np.concatenate([corners - dot, corners + dot])
    shares = axis.figure.transFigure.inverted().transform(corners)
    (left, low), (right, high) = shares.min(0).tolist(), shares.max(0).tolist()
    return Mark(left, 1 - high, right, 1 - low, text)


def _of_maps(of: Shown) -> Iterator[tuple[Table, list[Any]]]:
    """Yield the table of each heatmap, and a box for each of its cells."""
    down, across = of.down or "y", of.across or "x"
    for cells, rows, columns, y, x in of.maps:
        boxes = [
            ([x[j], y[i], x[j + 1], y[i + 1]], f"{down} {rows[i]}, {across} {columns[j]}: {v:.4g}")
            for (i, j), v in np.ndenumerate(cells)
            if np.isfinite(v)
        ]
        written = [
            [name, *("" if np.isnan(v) else f"{v:.4g}" for v in row)]
            for name, row in zip(rows, cells, strict=True)
        ]
        yield Table(of.title, [f"{down}, by {across}", *columns], written), boxes


def _of_series(of: Shown) -> Iterator[tuple[Table, list[Any]]]:
    """Yield one table of the curves, histograms and bars, and a box for each value."""
    series = [one for one in of.series if len(one.values)]
    if not series:
        return
    rows: dict[str, dict[int, str]] = {}
    boxes = []
    across = of.across or "x"
    names = [one.name or of.title or of.down for one in series]
    for number, (name, one) in enumerate(zip(names, series, strict=True)):
        for at, value, box in zip(one.at, one.values, one.boxes, strict=True):
            if np.isfinite(value):
                rows.setdefault(at, {})[number] = f"{value:.4g}"
                boxes.append((box, f"{name}, {across} {at}: {value:.4g}"))
    cells = [[at, *(row.get(n, "") for n in range(len(series)))] for at, row in rows.items()]
    yield Table(of.title, [across, *names], cells), boxes


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
    section: str  # of the page of an analysis, one of `SECTIONS`
    # title, caption: formula, unit and rows of the papers.
    title: str
    caption: str
    # Creates a matplotlib figure of what the page shows; None if it lacks the numbers.
    draw: Callable[..., Any]
    by_model: bool = False  # whether each model gets its own figure; `draw` then takes one analysis
    # Description in words, from the argument of `draw`; by default its extremes.
    finding: Callable[[Any], str] | None = None


def drawing(
    drawings: list[Drawing], name: str, section: str, title: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the decorated function to `drawings`; its docstring is the caption."""

    def add(draw: Callable[..., Any]) -> Callable[..., Any]:
        caption = " ".join((draw.__doc__ or "").split())
        drawings.append(Drawing(name, section, title, caption, draw, **options))
        return draw

    return add


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
    **of: Any,
) -> Picture:
    """Return the picture of a figure of matplotlib."""
    files = {kind: rendered(figure, kind, comment) for kind in kinds}
    return Picture(name, title, caption, files, numbers_of(figure), **of)


def pictures(drawings: Sequence[Drawing], *what: Any) -> list[Picture]:
    """Return the pictures of these figures for which there are numbers."""
    with styled():
        drawn = [(of, figure) for of in drawings if (figure := of.draw(*what)) is not None]
        return [picture_of(figure, of.name, of.title, of.caption) for of, figure in drawn]


def page_files(page: str, pictures: Sequence[Picture]) -> dict[str, Any]:
    """Return the files of a page: report.html and figures/."""
    return {"report.html": page} | {
        f"figures/{picture.name}.{kind}": content
        for picture in pictures
        for kind, content in picture.files.items()
    }
