"""The style of every figure: sizes for a page, and colors safe for color-blind readers.

Figures avoid pyplot and its back ends, so that matplotlib's global state stays untouched (figures
are also drawn during training). `styled` draws the names of models, datasets and tokens literally,
dollar signs included.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megasink.console.printable import printable
from megasink.figures.recorded_panels import Series, curve, named_axes, shown
from megasink.files.atomic import atomic_file

WIDTH = 11.0
"""Figure width in inches, about 1150 pixels on the page."""
DPI = 160

# Okabe and Ito (2008), ordered so that neighbors differ in lightness too.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, VERMILION, GREEN = PALETTE[:3]
DASHES: Any = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (9, 2)))
"""Line styles, in addition to colors, for lines that may hide each other."""
GRAY = "#6b7280"
MAP = "viridis"
DIVERGING = "PuOr_r"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
    "figure.facecolor": "white",
    "text.parse_math": False,
    "pdf.fonttype": 42,
}


@contextmanager
def styled() -> Iterator[None]:
    """Apply the style to figures made inside this context or decorated function."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def panels(
    rows: int,
    columns: int,
    height: float,
    *,
    width: float = WIDTH,
    layout: Any = "constrained",
    **options: Any,
) -> tuple[Any, Any]:
    """Return a figure and its axes [rows, columns]; `layout` None is faster for many panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def grid(count: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) for `count` panels, evenly, with at most `most` in a row."""
    rows = math.ceil(count / most)
    return rows, math.ceil(count / rows)


def even_panels(count: int, most: int, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its `count` axes, in even rows of at most `most`."""
    rows, columns = grid(count, most)
    figure, axes = panels(rows, columns, height * rows, **options)
    for axis in axes.flat[count:]:
        axis.set_axis_off()
    return figure, axes.flat[:count]


def rendered(figure: Any, kind: str = "png", comment: str | None = None) -> bytes:
    """Render the figure to a file's bytes, "png" or "pdf", without a date."""
    stream = BytesIO()
    metadata = {"CreationDate": None} if kind == "pdf" else {"Software": None, "Comment": comment}
    figure.savefig(stream, dpi=DPI, format=kind, metadata=metadata)
    return stream.getvalue()


def save(figure: Any, path: Path, comment: str | None = None) -> None:
    """Write the figure as a PNG, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(rendered(figure, comment=comment))


def model_colors(count: int) -> list[Any]:
    """Return one color per model: the palette, or a gradient for a series of checkpoints."""
    import matplotlib

    if count <= len(PALETTE):
        return list(PALETTE[:count])
    return list(matplotlib.colormaps[MAP](np.linspace(0.0, 0.9, count)))


def position_colors(count: int) -> list[Any]:
    """Return one color per position: position 0 stands out, the others follow a gradient."""
    import matplotlib

    scale = matplotlib.colormaps[MAP](np.linspace(0.05, 0.85, max(1, count - 1)))
    return [VERMILION, *scale][:count]


def named(analyses: Sequence[Any]) -> list[tuple[Any, Any, str]]:
    """Return each analysis with its color and its legend name."""
    names = [short(analysis.name, 40) for analysis in analyses]
    return list(zip(analyses, model_colors(len(analyses)), names, strict=True))


def model_legend(figure: Any, axis: Any, analyses: Sequence[Any]) -> None:
    """Put a legend above all panels if there are several models."""
    if len(analyses) > 1:
        legend(figure, axis)


def legend(figure: Any, axis: Any, most: int = 5) -> None:
    """Put the names of a panel's curves above all panels, at most this many in a row."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        place = "outside upper left" if figure.get_layout_engine() else "upper left"
        figure.legend(handles, labels, loc=place, ncols=min(len(handles), most))


def short(name: str, width: int) -> str:
    """Return a name on one line, with its middle elided if it is long."""
    name = " ".join(printable(name).split()) or "unnamed"
    if len(name) <= width:
        return name
    return f"{name[: width // 2 - 1]}…{name[-(width // 2) :]}"


def wrapped(name: str) -> str:
    """Return a name on at most two lines of 34 characters."""
    return "\n".join(textwrap.wrap(short(name, 66), 34)[:2])


def label(axis: Any, title: str, ylabel: str = "", xlabel: str = "") -> None:
    """Set title and axis labels."""
    named_axes(axis, title, ylabel, xlabel)
    axis.set_title(title)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)


def note(axis: Any, text: str) -> None:
    """Write a note in the middle of an empty axis."""
    axis.text(0.5, 0.5, text, ha="center", color=GRAY, transform=axis.transAxes)


def log_scale(*axes: Any) -> None:
    """Set logarithmic y axes with plain numbers and common limits."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    lines = [curve.get_ydata() for axis in axes for curve in axis.lines]
    values = np.concatenate([np.asarray(curve, dtype=float) for curve in lines] or [np.ones(1)])
    values = values[np.isfinite(values) & (values > 0)]
    low, high = (values.min() / 1.25, values.max() * 1.25) if len(values) else (0.1, 10.0)
    for axis in axes:
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        if high / low < 8:
            axis.yaxis.set_major_locator(MaxNLocator(5))
        else:
            steps = (1.0, 2.0, 5.0) if high / low < 200 else (1.0,)
            axis.yaxis.set_major_locator(LogLocator(subs=steps))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())


def share_limit(*axes: Any) -> None:
    """Set y from 0 to the next of 10, 25, 50 and 100% above the curves, for all axes."""
    highest = max((np.nanmax(curve.get_ydata()) for a in axes for curve in a.lines), default=0.0)
    top = next((x for x in (0.1, 0.25, 0.5) if highest <= x), 1.0)
    for axis in axes:
        axis.set_ylim(-0.03 * top, 1.04 * top)


def density(axis: Any, values: Any, edges: Any, color: Any, name: str) -> None:
    """Draw the step outline of a density over bins, lightly filled."""
    axis.stairs(values, edges, color=color, linewidth=1.4, label=name)
    axis.stairs(values, edges, color=color, fill=True, alpha=0.15)
    bins = list(pairwise(edges))
    boxes = [([a, 0.0], [b, v]) for (a, b), v in zip(bins, values, strict=True)]
    at = [f"{a:.4g} to {b:.4g}" for a, b in bins]
    shown(axis).series.append(Series(name, at, values, boxes))


def whole_numbers(*axes: Any) -> None:
    """Place ticks at whole numbers only: layers, heads, positions."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def heatmap(
    axis: Any,
    table: Any,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    sides: Sequence[float] | None = None,
    **options: Any,
) -> Any:
    """Draw an image with blank missing cells, and record it; by default columns are 1 wide."""
    axis.grid(False)
    cells = np.ma.masked_invalid(table)
    height, width = cells.shape
    left, right = (-0.5, width - 0.5) if sides is None else sides
    ends = (-0.5, height - 0.5) if options.get("origin") == "lower" else (height - 0.5, -0.5)
    options |= {"aspect": "auto", "interpolation": "nearest"}
    image = axis.imshow(cells, extent=(left, right, *ends), **options)
    down, across = (
        [" ".join(name.split()) or str(i) for i, name in enumerate(given)]
        for given in (rows or map(str, range(height)), columns or map(str, range(width)))
    )
    y, x = np.arange(height + 1) - 0.5, np.linspace(left, right, width + 1)
    shown(axis).maps.append((np.ma.filled(cells.astype(float), np.nan), down, across, y, x))
    whole_numbers(axis.xaxis, axis.yaxis)
    return image


def shares_of_heads(by_score: dict[str, dict[str, Any]]) -> Any:
    """Draw maps of the share of samples in which each head is inactive, or return None."""
    if not by_score:
        return None
    maps = list(by_score.values())
    layers, heads = next(iter(maps[0].values())).shape
    width = min(2.0 + 0.9 * max(map(len, maps)) * max(1.0, heads / 12), 18.0)
    height = min(2.6, max(1.2, 0.1 * layers + 0.7)) * len(maps) + 0.8
    columns = max(map(len, maps))
    figure, axes = panels(len(maps), columns, height, width=width, sharex=True, sharey=True)
    for row, (score, of) in zip(axes, by_score.items(), strict=True):
        for axis, (setting, table) in zip(row, of.items(), strict=False):
            image = heatmap(axis, table, vmin=0, vmax=1, cmap="magma")
            named_axes(axis, setting, "layer", "head")
            axis.set_title(setting, fontsize=8)
        for axis in row[len(of) :]:
            axis.set_axis_off()
        named_axes(row[0], title := f"{score}\n{next(iter(of))}")
        row[0].set_title(title, fontsize=8)
        row[0].set_ylabel("layer")
    for axis in axes[-1]:
        axis.set_xlabel("head")
    figure.colorbar(image, ax=axes, label="share of samples")
    return figure


def write_cells(axis: Any, image: Any, table: Any, size: float, form: str = "{:.2f}") -> None:
    """Write a table's numbers in its cells, light on dark; small ones drop the leading 0."""
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            text = form.format(value) if value < 100 else f"{value:.0f}"
            if size < 6:
                text = "1" if text == "1.00" else text.removeprefix("0")
            style = {"fontsize": size, "color": "white" if dark else "black"}
            axis.text(column, row, text, ha="center", va="center", **style)


def by_position(axis: Any, points: Any, position: Any, size: float, star: float) -> Any:
    """Scatter points of tokens, colored by position, with a star for token 0; return the dots."""
    first = position == 0
    options = {"c": position[~first], "cmap": MAP, "alpha": 0.85, "linewidth": 0}
    dots = axis.scatter(*points[~first].T, s=size, **options)
    options = {"marker": "*", "color": VERMILION, "ec": "black", "lw": 0.4}
    axis.scatter(*points[first].T, s=star, **options, label="token 0")
    return dots


def line(axis: Any, x: Any, y: Any, **style: Any) -> None:
    """Draw a curve through the finite points, with markers if they are few."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    there = np.isfinite(y)
    few = "o" if there.sum() <= 40 else ""
    curve(axis, x[there], y[there], marker=few, **style)


def zoom(axis: Any) -> None:
    """Exclude the first tenth of the curves from the scale: all runs start equally high."""
    tails = [line.get_ydata()[len(line.get_ydata()) // 10 :] for line in axis.lines]
    values = np.concatenate([np.zeros(0), *(np.asarray(tail, dtype=float) for tail in tails)])
    values = values[np.isfinite(values)]
    if len(values) and values.max() > values.min():
        margin = 0.05 * (values.max() - values.min())
        axis.set_ylim(values.min() - margin, values.max() + margin)
