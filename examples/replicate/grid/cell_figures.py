"""Figures about cells, each with several seeds: numbers by cell, and curves with a band."""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.replicate.grid.bands import Band, draw_band
from megasink.analysis.metrics import metrics
from megasink.figures.style import (
    DASHES,
    GRAY,
    PALETTE,
    even_panels,
    grid,
    label,
    model_colors,
    note,
    panels,
    short,
    zoom,
)

# Names of metrics.jsonl and of the experiments' own numbers -> title and unit.
_TITLES = {
    "lm_loss": ("training loss, moving average", "nats per token"),
    "valid_lm_loss": ("validation loss", "nats per token"),
    "valid_bits_per_byte": ("validation", "bits per byte"),
    "imbalance": ("head imbalance, moving average", "coefficient of variation"),
    "spikes": ("loss spikes", "count"),
    "valid_sink_rate_slot": ("heads with a sink on the slot", "% of heads"),
    "least_share": ("sinks left without the least head of layer 0", "share"),
    "all_share": ("sinks left without layer 0's heads", "share"),
    "norm_first_over_later": ("layer 0's output, first over later", "ratio of norms"),
    "square_sum_last": ("sum of squared weights, last token", "share"),
    "cone_alpha": ("cone model: alpha", ""),
    "cone_r2": ("cone model: variance explained", "share"),
    "cone_tau": ("cone model: tau", ""),
}
_WHERE = {"with_bos": "with BOS: ", "without_bos": "without BOS: "}
_SWEPT = {
    "auc": ("loss as heads marked by {} go", "nats per token, mean"),
    "rank": ("rank of {} among the scores", "rank"),
    "removable": ("heads that can go, by {}", "% of heads"),
}


def title_of(name: str) -> tuple[str, str]:
    """Return title and unit of a metric of a grid; its name and "" if it has no better one."""
    *folders, measured = name.split("/")
    before = _WHERE.get(folders[0], "") if folders else ""
    if measured in _TITLES:
        title, unit = _TITLES[measured]
        return short(before + title, 50), unit
    if folders[:1] == ["ablation"] and measured in _SWEPT:
        score = folders[1]
        known = (
            "random heads" if score == "random" else score.upper().replace("_EITHER", " (either)")
        )
        title, unit = _SWEPT[measured]
        return title.format(metrics()[score].title if score in metrics() else known), unit
    if folders[:1] == ["zeroed"]:
        known = metrics()[folders[1]].title if folders[1] in metrics() else "random heads"
        return f"loss with {measured} % zeroed by {known}", "nats per token"
    if trained := re.fullmatch(r"trained_at_(\d+)(_yarn)?(?:/(\d+))?", name):
        after = " with YaRN" if trained[2] else ""
        at = f" at {trained[3]} tokens" if trained[3] else ""
        return f"trained at {trained[1]}{after}: recall{at}", "share"
    if measured in metrics() and measured != name:
        entry = metrics()[measured]
        return short(before + entry.title, 50), "" if entry.unit == "1" else entry.unit
    return short(name, 44), ""


def draw_numbers(
    numbers: Mapping[str, Mapping[str, Sequence[float]]], cells: Mapping[str, str], title: str = ""
) -> Any:
    """Return a figure with a panel per metric: all seeds, mean and standard deviation by cell.

    Args:
        numbers: metric -> cell -> values; a cell may be missing.
        cells: cell -> label, from the top.
    """
    from matplotlib.ticker import MaxNLocator

    colors = dict(zip(cells, model_colors(len(cells)), strict=True))
    longest = min(40, max(map(len, cells)))
    _, columns = grid(len(numbers), 3)
    height = 0.9 + 0.24 * max(4, len(cells))
    width = max(6.0, 0.085 * longest + 3.4 * columns)
    # Cells downward: their names can be read however many there are.
    figure, axes = even_panels(len(numbers), 3, height, width=width, sharey=True)
    for index, (axis, (metric, by_cell)) in enumerate(zip(axes, numbers.items(), strict=True)):
        for row, name in enumerate(cells):
            if values := by_cell.get(name):
                _draw_seeds(axis, row, values, colors[name])
        axis.set_ylim(len(cells) - 0.5, -0.5)
        label(axis, title_of(metric)[0], "", title_of(metric)[1])
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        if not any(by_cell.values()):
            axis.set_xticks([])
            axis.text(0.5, 0.5, "no number", ha="center", color=GRAY, transform=axis.transAxes)
        if index % columns == 0:
            axis.set_yticks(range(len(cells)), list(cells.values()))
    figure.suptitle(short(title, 100) if title else None, fontsize=11, x=0.01, ha="left")
    return figure


def _draw_seeds(axis: Any, row: int, values: Sequence[float], color: Any) -> None:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    axis.scatter(values, row + _apart(len(values)), s=14, color=color, alpha=0.55, linewidth=0)
    style = {"color": color, "markersize": 7, "capsize": 3, "elinewidth": 1.3}
    axis.errorbar([np.mean(values)], [row], xerr=[deviation], fmt="|", zorder=3, **style)


def _apart(count: int) -> NDArray[np.float64]:
    """Return small vertical offsets, so that equal values of several seeds can be told apart."""
    return np.linspace(-0.18, 0.18, count) if count > 1 else np.zeros(count)


def draw_bands(
    curves: Mapping[str, Mapping[str, Band]],
    cells: Sequence[str],
    title: str = "",
    x: str = "step",
) -> Any:
    """Return a figure with a panel per curve: mean and standard deviation over seeds, by cell.

    With more cells than there are colors that can be told apart, every cell has a panel of its own.

    Args:
        curves: name -> cell -> its curve; a cell may be missing.
        cells: all of them, in the order of their colors.
        x: label of the horizontal axis.
    """
    if curves and len(cells) > len(PALETTE):
        return _draw_apart(curves, cells, title, x)
    colors = dict(zip(cells, model_colors(len(cells)), strict=True))
    dashes = dict(zip(cells, itertools.cycle(DASHES), strict=False))
    count = max(1, len(curves))
    rows, columns = grid(count, 3)
    legend = 0.22 * -(-len(cells) // 4)
    height = 3.8 + (0.2 + legend) / rows
    figure, axes = even_panels(count, 3, height, width=4.7 * max(2, columns))
    for axis, (name, by_cell) in zip(axes, curves.items(), strict=False):
        for cell, band in by_cell.items():
            draw_band(axis, band, colors[cell], short(cell, 40), dashes=dashes[cell])
        text, unit = title_of(name)
        label(axis, text, unit, x)
        if unit in ("nats per token", "bits per byte"):
            zoom(axis)
    if not curves:
        note(axes[0], "no run is finished")
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)))
    figure.suptitle(short(title, 100) if title else None, fontsize=11, x=0.01, ha="left")
    return figure


def _draw_apart(
    curves: Mapping[str, Mapping[str, Band]], cells: Sequence[str], title: str, x: str
) -> Any:
    """As `draw_bands`, with a panel per curve and cell, and the other cells in gray behind it."""
    each, columns = grid(len(cells), 7)
    rows = each * len(curves)
    figure, axes = panels(
        rows, columns, 1.55 * rows + 0.4, width=1.75 * columns + 0.8, sharex=True, sharey=False
    )
    for number, (name, by_cell) in enumerate(curves.items()):
        text, unit = title_of(name)
        block = axes[number * each : (number + 1) * each]
        for axis, cell in zip(block.flat, cells, strict=False):
            for other in by_cell:
                axis.plot(by_cell[other].steps, by_cell[other].mean, color="0.82", linewidth=0.7)
            if unit in ("nats per token", "bits per byte"):
                zoom(axis)
            limits = axis.get_ylim()
            if cell in by_cell:
                draw_band(axis, by_cell[cell], PALETTE[0], cell)
            axis.set_ylim(limits)
            axis.set_title(short(cell, 24), fontsize=8)
            axis.tick_params(labelsize=7)
        for axis in block.flat[len(cells) :]:
            axis.set_axis_off()
        for row in block:
            for axis in row[1:]:
                axis.tick_params(labelleft=False)
        block[0, 0].set_ylabel(f"{text}\n{unit}".strip(), fontsize=8, loc="top")
    figure.supxlabel(x, fontsize=9)
    figure.suptitle(short(title, 100) if title else None, fontsize=11, x=0.01, ha="left")
    return figure
