"""Draw curves and bars, and record what a panel shows, for the table behind its picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MOST_POINTS = 200
"""A recorded curve with more points than this is thinned to `THINNED`."""
THINNED = 41


@dataclass
class Shown:
    """The contents of a panel, as the functions below record them while they draw."""

    # title, across, down: of the panel, its columns or x axis, and its rows or y axis.
    title: str = ""
    across: str = ""
    down: str = ""
    # Cells, the names of rows and columns, and the edges of both in the panel's coordinates.
    maps: list[tuple[Any, list[str], list[str], Any, Any]] = field(default_factory=list)
    series: list["Series"] = field(default_factory=list)


class Series(NamedTuple):
    """A curve, a histogram or a row of bars."""

    name: str
    at: list[str]  # where each value is
    values: Any
    boxes: Any  # a point or two corners for each value, in the panel's coordinates


def shown(axis: Any) -> Shown:
    """Return the record of a panel."""
    if not hasattr(axis, "shown"):
        axis.shown = Shown()
    record: Shown = axis.shown
    return record


def named_axes(axis: Any, title: str = "", down: str = "", across: str = "") -> None:
    """Record the title of a panel and the names of its axes, where another panel has the label."""
    record = shown(axis)
    for name, text in (("title", title), ("down", down), ("across", across)):
        setattr(record, name, " ".join(text.split()) or getattr(record, name))


def curve(axis: Any, x: Any, y: Any, form: str = "", name: str = "", **style: Any) -> None:
    """Draw a curve, and record it; a long one, such as of all heads, is thinned to `THINNED`."""
    axis.plot(x, y, form, label=name or "_", **style)
    record_curve(axis, x, y, name)


def record_curve(axis: Any, x: Any, y: Any, name: str) -> None:
    """Record the finite points of a curve."""
    at = [text if isinstance(text, str) else f"{text:.6g}" for text in x]
    place = range(len(x)) if at and isinstance(x[0], str) else x
    points = np.stack([np.asarray(place, dtype=float), np.asarray(y, dtype=float)], 1)
    kept = np.arange(len(points))
    if len(points) > MOST_POINTS:
        kept = np.unique(np.linspace(0, len(points) - 1, THINNED).round().astype(int))
    kept = kept[np.isfinite(points[kept]).all(1)]
    shown(axis).series.append(
        Series(" ".join(name.split()), [at[i] for i in kept], points[kept, 1], points[kept])
    )


def ecdf(axis: Any, values: Any, name: str, **style: Any) -> None:
    """Draw the cumulative distribution of values, and record it."""
    axis.ecdf(values, **style)
    record_curve(axis, np.sort(values), np.arange(1, len(values) + 1) / len(values), name)


def bars(
    axis: Any, values: Any, names: Sequence[str] = (), *, upright: bool = True, **style: Any
) -> None:
    """Draw a row of bars at 0, 1, ..., which may have names, and record it."""
    values = np.asarray(values, dtype=float)
    places = np.arange(len(values))
    (axis.bar if upright else axis.barh)(places, values, **style)
    boxes = np.stack([places - 0.4, 0 * values, places + 0.4, values], 1).reshape(-1, 2, 2)
    boxes = boxes if upright else boxes[..., ::-1]
    at = [" ".join(name.split()) for name in names] or list(map(str, places))
    shown(axis).series.append(Series("", at, values, boxes))
