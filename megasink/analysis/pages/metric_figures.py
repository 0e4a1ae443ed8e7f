"""Figures built from the registry: one panel per curve, and a heatmap of heads.

Several models share a panel, or stand side by side.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from megasink.analysis.analysis_object import Analysis, Floats
from megasink.analysis.metrics import Metric, metrics_shown
from megasink.analysis.pages.drawing import Drawing
from megasink.figures import style
from megasink.figures.recorded_panels import curve

CURVES = {
    "sinks": ("Sinks", "Attention sinks"),
    "values": ("Sinks", "Values, keys and queries by token"),
    "activations": ("Hidden states", "Largest activations"),
}
"""Curve figure -> its section of the page and its title, in the page's order. Other figures are in
"Other metrics"."""

_ABSCISSA = {
    "head": "layer",
    "layer": "layer",
    "state": "layer (half: after attention)",
    "head column": "key position k",
    "key": "key position k",
    "layer position": "token position i",
    "state position": "token position i",
}
_READABLE = 160  # maximum number of cells with readable numbers


def metric_drawings() -> list[Drawing]:
    """Return a drawing for each figure that a registered metric names."""
    curves: dict[str, list[Metric]] = {figure: [] for figure in CURVES}
    for entry in metrics_shown("curve").values():
        curves.setdefault(entry.figure, []).append(entry)
    drawings = []
    for figure, entries in curves.items():
        section, title = CURVES.get(figure, ("Other metrics", figure.replace("_", " ")))
        caption = " ".join(f"{e.title}: {_definition(e)}" for e in entries)
        caption += " Means over samples. Metrics that are 0 for every model have no panel."
        drawings.append(Drawing(figure, section, title, caption, partial(_draw_curves, entries)))
    for name, entry in metrics_shown("heatmap").items():
        caption = f"{_definition(entry)} Shared color scale. Layers without attention are blank."
        draw = partial(_draw_heatmap, entry)
        drawings.append(Drawing(name, "Heads", entry.title.capitalize(), caption, draw))
    return drawings


def _definition(entry: Metric) -> str:
    return f"{entry.definition.rstrip('.')} ({entry.source})."


def _draw_curves(entries: Sequence[Metric], analyses: Sequence[Analysis]) -> Any:
    """Draw one panel per metric, except metrics that are 0 for every model (no sink weight)."""
    shown = [e for e in entries if any(a.has(e.name) and a.values(e.name).any() for a in analyses)]
    if not shown:
        return None
    figure, axes = style.even_panels(len(shown), 5, 3.2)
    by_unit: dict[str, list[Any]] = {}
    for axis, entry in zip(axes, shown, strict=True):
        for analysis, color, name in style.named(analyses):
            if analysis.has(entry.name):
                x, curve = _curve(entry, analysis.values(entry.name))
                style.line(axis, x, curve, color=color, name=name)
        style.label(
            axis, entry.title, "" if entry.unit == "1" else entry.unit, _ABSCISSA[entry.axis]
        )
        style.whole_numbers(axis.xaxis)
        by_unit.setdefault(entry.unit, []).append(axis)
    for unit, those in by_unit.items():
        if unit == "share":
            style.share_limit(*those)
        elif unit in ("activation", "ratio"):
            style.log_scale(*those)
        for axis in those:
            if unit == "cosine":
                axis.set_ylim(-1.05, 1.05)
            elif unit.startswith("L2 norm"):
                highest = max(np.nanmax(curve.get_ydata()) for curve in axis.lines)
                axis.set_ylim(0, 1.05 * highest if highest > 0 else 1)
    style.model_legend(figure, axes[0], analyses)
    return figure


def _curve(entry: Metric, values: Floats) -> tuple[Any, Any]:
    """Return x and y of the curve: means over all other axes."""
    if entry.axis == "head":
        curve = np.ma.masked_invalid(values).mean(1)
    elif entry.axis in ("layer", "state", "key"):
        curve = np.ma.masked_invalid(values)
    else:
        curve = np.ma.masked_invalid(values.reshape(-1, values.shape[-1])).mean(0)
    step = 0.5 if entry.axis == "state" else 1.0
    return step * np.arange(len(curve)), np.ma.filled(curve, np.nan)


def _draw_heatmap(entry: Metric, analyses: Sequence[Analysis]) -> Any:
    analyses = [analysis for analysis in analyses if analysis.has(entry.name)]
    if not analyses:
        return None
    tables = [analysis.values(entry.name) for analysis in analyses]
    layers = max(len(table) for table in tables)
    figure, axes = style.even_panels(
        len(analyses), 3, float(np.clip(0.24 * layers + 1.3, 2.8, 8.0))
    )
    lowest = float(min(np.nanmin(table) for table in tables))
    highest = float(max(np.nanmax(table) for table in tables))
    if entry.unit == "share":  # round down: gates of a balanced model differ little
        lowest, highest = min(0.9, float(np.floor(10 * lowest) / 10)), 1.0
    for axis, analysis, table in zip(axes, analyses, tables, strict=True):
        image = style.heatmap(axis, table, vmin=lowest, vmax=highest, cmap=style.MAP)
        # The numbers derived from this metric, such as head imbalance from importance.
        numbers = (
            f"{made.title} {made.text(analysis.results.metrics[made.name].number)}"
            for made in metrics_shown("scalar").values()
            if made.needs == (f"{entry.name}_LH",) and analysis.has(made.name)
        )
        style.label(axis, f"{style.wrapped(analysis.name)}\n{', '.join(numbers)}", "layer", "head")
        if table.size <= _READABLE and len(analyses) <= 3:
            style.write_cells(axis, image, table, 6.5 if len(analyses) < 3 else 5.5)
    bar_label = entry.title if entry.unit == "1" else f"{entry.title}, {entry.unit}"
    figure.colorbar(image, ax=figure.axes, label=bar_label)
    return figure


POSITIONS = (0, 1, 2, 4, 8, 16, 32)


def _by_position(key: str, ylabel: str, analyses: Sequence[Analysis]) -> Any:
    """Draw states along x, one curve for each of some positions, one panel per model."""
    analyses = [analysis for analysis in analyses if analysis.has(key)]
    if not analyses:
        return None
    figure, axes = style.even_panels(len(analyses), 3, 3.4, sharey=True)
    for axis, analysis in zip(axes, analyses, strict=True):
        table = analysis.values(key)
        state = np.arange(len(table)) / 2
        reached = [p for p in POSITIONS if p < table.shape[1] and np.isfinite(table[:, p]).any()]
        for position, color in zip(reached, style.position_colors(len(reached)), strict=True):
            there = np.isfinite(table[:, position])
            x, y = state[there], table[there, position]
            width, order = (2.2, 3) if position == 0 else (1.2, 2)
            name = f"token {position}"
            curve(axis, x, y, "-", name, color=color, linewidth=width, zorder=order)
            if len(x) <= 81:
                size = 4 if len(x) <= 33 else 2.2
                for points, fill in ((x == np.floor(x), color), (x != np.floor(x), "white")):
                    options = {"color": color, "mfc": fill, "mew": 0.8, "ms": size, "zorder": 4}
                    axis.plot(x[points], y[points], "o", **options)
        style.label(axis, style.wrapped(analysis.name), ylabel, "layer (half: after attention)")
        style.whole_numbers(axis.xaxis)
    if key == "state_norm":
        style.log_scale(*axes)
    else:
        axes[0].set_ylim(-0.25, 1.05)
    style.legend(figure, axes[0], len(POSITIONS))
    return figure


DRAWINGS = (
    Drawing(
        "norms",
        "Hidden states",
        "Norm of the hidden state",
        "norm(x_i) by layer, mean over samples, for some token positions (P4.1, P2.8). x_0 is the "
        "embedding, x_(l + 1/2) the state after attention of block l (open circles), x_(l + 1) its "
        "output (filled circles).",
        partial(_by_position, "state_norm", "mean L2 norm"),
    ),
    Drawing(
        "directions",
        "Hidden states",
        "Direction of the hidden state across inputs",
        "Mean cosine between the states of different inputs at the same position, over pairs "
        "i != j (P4.5). 1 means that the state no longer depends on the input. Circles as above.",
        partial(_by_position, "cosine_across_inputs", "mean cosine"),
    ),
)
