"""Extract the numbers of a figure: a title on hover for each mark, and a table.

Read from the axes of the figure, so that a drawing is all that a page needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

MOST_CELLS = 6000
"""Numbers of one picture that a page holds: a map of 80 layers of 64 heads is whole."""
MOST_POINTS = 200
"""A curve of more points, such as a distribution of all heads, is thinned to `THINNED`."""
THINNED = 41
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


class _Series(NamedTuple):
    """A curve, a histogram or a row of bars."""

    name: str
    at: list[str]
    values: Any
    boxes: list[Any]


def numbers_of(figure: Any) -> Numbers:
    """Return the numbers of a figure of matplotlib that was rendered, so that its layout is made.

    Scattered points have none: they are projections, and the arrays beside the page hold them.
    """
    bars = {
        of.colorbar.ax for a in figure.axes for of in (*a.images, *a.collections) if of.colorbar
    }
    marks: list[Mark] = []
    tables: list[Table] = []
    is_whole, cells = True, 0
    for axis in figure.axes:
        if axis in bars or not axis.axison:
            continue
        for table, boxes in (*_of_images(axis), *_of_series(axis)):
            cells += len(table.rows) * (len(table.head) - 1)
            if cells > MOST_CELLS:
                is_whole = False
                break
            tables.append(table)
            marks += [_mark(figure, box, text) for box, text in boxes]
    return Numbers(marks, tables, is_whole)


def _mark(figure: Any, box: Any, text: str) -> Mark:
    (left, low), (right, high) = figure.transFigure.inverted().transform(box)
    left, right = sorted((float(left), float(right)))
    low, high = sorted((float(low), float(high)))
    return Mark(left, 1 - high, right, 1 - low, text)


def _of_images(axis: Any) -> Iterator[tuple[Table, list[Any]]]:
    """Yield the table of each heatmap of an axis, and a box for each of its cells."""
    for image in axis.images:
        cells = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        if cells.ndim != 2:
            continue
        left, right, bottom, top = image.get_extent()
        first, last = (bottom, top) if image.origin == "lower" else (top, bottom)
        x = np.linspace(left, right, cells.shape[1] + 1)
        y = np.linspace(first, last, cells.shape[0] + 1)
        columns = [_text(axis.xaxis, (a + b) / 2) for a, b in pairwise(x)]
        rows = [_text(axis.yaxis, (a + b) / 2) for a, b in pairwise(y)]
        down, across = _name(axis, "y"), _name(axis, "x")
        boxes = [
            (
                axis.transData.transform([(x[j], y[i]), (x[j + 1], y[i + 1])]),
                f"{down} {rows[i]}, {across} {columns[j]}: {value:.4g}",
            )
            for (i, j), value in np.ndenumerate(cells)
            if np.isfinite(value)
        ]
        written = [
            [name, *("" if np.isnan(v) else f"{v:.4g}" for v in row)]
            for name, row in zip(rows, cells, strict=True)
        ]
        yield Table(_title(axis), [f"{down}, by {across}", *columns], written), boxes


def _of_series(axis: Any) -> Iterator[tuple[Table, list[Any]]]:
    """Yield one table of the curves, histograms and bars of an axis, and a box for each value."""
    series = [one for one in (*_lines(axis), *_stairs(axis), *_bars(axis)) if len(one.values)]
    if not series:
        return
    rows: dict[str, dict[int, str]] = {}
    boxes = []
    across = _name(axis, "x")
    for number, one in enumerate(series):
        for at, value, box in zip(one.at, one.values, one.boxes, strict=True):
            if np.isfinite(value):
                rows.setdefault(at, {})[number] = f"{value:.4g}"
                boxes.append((box, f"{one.name}, {across} {at}: {value:.4g}"))
    cells = [[at, *(of.get(n, "") for n in range(len(series)))] for at, of in rows.items()]
    yield Table(_title(axis), [across, *(one.name for one in series)], cells), boxes


def _lines(axis: Any) -> Iterator[_Series]:
    """Yield the curves of an axis; if some are named, only those: the others are raw or guides."""
    lines = [line for line in axis.lines if line.get_transform() == axis.transData]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    for line in named or lines:
        points = np.asarray(line.get_xydata(), dtype=float)
        if len(points) > MOST_POINTS:
            points = points[np.unique(np.linspace(0, len(points) - 1, THINNED).round().astype(int))]
        points = points[np.isfinite(points).all(1)]
        dot = np.full(2, _DOT * axis.figure.bbox.width)
        boxes = [(center - dot, center + dot) for center in axis.transData.transform(points)]
        at = [_text(axis.xaxis, x) for x, _ in points]
        yield _Series(_named(axis, line), at, points[:, 1], boxes)


def _stairs(axis: Any) -> Iterator[_Series]:
    from matplotlib.patches import StepPatch

    outlines = [p for p in axis.patches if isinstance(p, StepPatch) and not p.get_fill()]
    for patch in outlines:
        values, edges, _ = patch.get_data()
        boxes = [
            axis.transData.transform([(a, 0), (b, v)])
            for a, b, v in zip(edges, edges[1:], values, strict=False)
        ]
        at = [f"{a:.4g} to {b:.4g}" for a, b in pairwise(edges)]
        yield _Series(_named(axis, patch), at, values, boxes)


def _bars(axis: Any) -> Iterator[_Series]:
    from matplotlib.container import BarContainer

    for bars in (of for of in axis.containers if isinstance(of, BarContainer)):
        upright = bars.orientation != "horizontal"
        at = [
            _text(axis.xaxis, b.get_x() + b.get_width() / 2)
            if upright
            else _text(axis.yaxis, b.get_y() + b.get_height() / 2)
            for b in bars
        ]
        values = [b.get_height() if upright else b.get_width() for b in bars]
        boxes = [b.get_window_extent().get_points() for b in bars]
        yield _Series(_named(axis, bars), at, values, boxes)


def _title(axis: Any) -> str:
    titles = (axis.get_title(place) for place in ("left", "center", "right"))
    return " ".join(" ".join(filter(None, titles)).split())


def _named(axis: Any, artist: Any) -> str:
    """Return the name of a curve, or else the title of its axis."""
    name = str(artist.get_label())
    if name.startswith("_"):
        name = _title(axis) or axis.get_ylabel()
    return " ".join(name.split())


def _name(axis: Any, which: str) -> str:
    """Return the label of an axis, or that of a panel that shares it."""
    shared = axis.get_shared_x_axes() if which == "x" else axis.get_shared_y_axes()
    labels = (getattr(other, f"get_{which}label")() for other in (axis, *shared.get_siblings(axis)))
    return next(filter(None, labels), which)


def _text(ticks: Any, value: float) -> str:
    """Return a value as the axis has it: the name of its tick, or the number."""
    from matplotlib.category import StrCategoryFormatter
    from matplotlib.ticker import FuncFormatter

    formatter = ticks.get_major_formatter()
    has_names = isinstance(formatter, FuncFormatter | StrCategoryFormatter)
    name = formatter(value, 0) if has_names else ""
    return " ".join(name.split()) or f"{value:.6g}"
