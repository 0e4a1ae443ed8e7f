"""The figures of a grid: every metric by cell, and curves with a band over the seeds."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.report.bands import band_of, draw_band, zoom
from megasink.report.grid_results import GridResults
from megasink.report.style import (
    GRAY,
    label,
    model_colors,
    note,
    panels,
    save,
    short,
    styled,
)

_CURVES = (
    ("lm_loss", "training loss (EMA 0.9)", "nats per token"),
    ("valid_bits_per_byte", "validation", "bits per byte"),
    ("valid_lm_loss", "validation", "nats per token"),
    ("imbalance", "head imbalance (EMA 0.9)", "coefficient of variation"),
)


@styled()
def draw_curves(results: GridResults, output: Path) -> None:
    """Draw losses and imbalance over steps: mean and standard deviation over seeds, by cell.

    Raises:
        OSError: the file cannot be written.
    """
    cells = results.cells
    shown = [entry for entry in _CURVES if any(band_of(cell, entry[0]) for cell in cells.values())]
    if any(name == "valid_bits_per_byte" for name, *_ in shown):
        shown = [entry for entry in shown if entry[0] != "valid_lm_loss"]
    rows = -(-len(cells) // 4)
    count = max(1, len(shown))
    figure, (axes,) = panels(1, count, 4.0 + 0.22 * rows, width=4.7 * max(2, count))
    colors = cell_colors(results)
    for axis, (name, title, unit) in zip(axes, shown, strict=False):
        for cell_name, cell in cells.items():
            if (band := band_of(cell, name)) is not None:
                draw_band(axis, band, colors[cell_name], short(cell_name, 40))
        label(axis, title, unit, "step")
        if unit != "coefficient of variation":
            zoom(axis)
    if not shown:
        note(axes[0], "no run is finished")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)))
    figure.suptitle(short(results.title, 100), fontsize=11, x=0.01, ha="left")
    save(figure, output)


def cell_colors(results: GridResults) -> dict[str, Any]:
    """Return a color for every cell."""
    return dict(zip(results.cells, model_colors(len(results.cells)), strict=True))


@styled()
def draw_cells(results: GridResults, output: Path) -> None:
    """Draw each metric of the file: the points of all seeds, mean and deviation, by cell.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    names = list(results.cells)
    colors = cell_colors(results)
    longest = min(40, max(map(len, names)))
    columns = max(1, min(3, len(results.metrics)))
    rows = -(-len(results.metrics) // columns)
    height = 0.9 + 0.24 * max(4, len(names))
    width = max(6.0, 0.085 * longest + 3.4 * columns)
    # Cells downward: their names can be read however many there are.
    figure, grid_axes = panels(rows, columns, height * rows, width=width, sharey=True)
    axes = grid_axes.flat[: len(results.metrics)]
    for axis in grid_axes.flat[len(results.metrics) :]:
        axis.set_axis_off()
    for index, (axis, metric) in enumerate(zip(axes, results.metrics, strict=True)):
        _draw_metric(axis, metric, results, colors)
        label(axis, short(metric, 44))
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        if index % columns == 0:
            axis.set_yticks(range(len(names)), [_cell_label(n, results) for n in names])
    figure.suptitle(short(results.title, 100), fontsize=11, x=0.01, ha="left")
    save(figure, output)


def _cell_label(name: str, results: GridResults) -> str:
    cell = results.cells[name]
    parts = [short(name, 40)]
    if cell.diverged:
        total = len(cell.runs) + len(cell.missing)
        parts.append(f"{len(cell.diverged)} of {total} diverged")
    return "\n".join(parts)


def _draw_metric(axis: Any, metric: str, results: GridResults, colors: dict[str, Any]) -> None:
    is_empty = True
    for row, (name, cell) in enumerate(results.cells.items()):
        spread = cell.metrics.get(metric)
        if spread is None:
            continue
        is_empty = False
        values = list(spread.values.values())
        heights = row + _apart(len(values))
        axis.scatter(values, heights, s=14, color=colors[name], alpha=0.55, linewidth=0)
        deviation = spread.standard_deviation or 0.0
        style = {"color": colors[name], "markersize": 7, "capsize": 3, "elinewidth": 1.3}
        axis.errorbar([spread.mean], [row], xerr=[deviation], fmt="|", zorder=3, **style)
    axis.set_ylim(len(results.cells) - 0.5, -0.5)
    if is_empty:
        axis.set_xticks([])
        axis.text(0.5, 0.5, "no number", ha="center", color=GRAY, transform=axis.transAxes)


def _apart(count: int) -> NDArray[np.float64]:
    """Return small vertical offsets, so that equal values of several seeds can be told apart."""
    return np.linspace(-0.18, 0.18, count) if count > 1 else np.zeros(count)
