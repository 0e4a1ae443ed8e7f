"""Compare runs on one page: smoothed training loss, validation, head imbalance, and a table."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.report.bands import Array, band_of, draw_band, zoom
from megasink.report.curves import mark_spikes, series, smoothed
from megasink.report.grid_results import EMA, SMOOTHED, CellResults
from megasink.report.spikes import loss_spikes
from megasink.report.style import label, model_colors, panels, save, styled

COLUMNS = {
    "steps": "steps",
    "loss": "lm_loss",
    "spikes": "spikes",
    "validation": "valid_lm_loss",
    "bits/byte": "valid_bits_per_byte",
    "imbalance": "imbalance",
}
"""Column of `summary` -> metric of a grid."""


@styled()
def draw_comparison(
    runs: dict[str, list[dict[str, Any]]],
    output: Path,
    *,
    cells: Mapping[str, CellResults] | None = None,
    x: str = "step",
    factor: float = EMA,
    comment: str | None = None,
) -> None:
    """Draw the curves of several runs in the same axes (P0.20, P1.41).

    Args:
        runs: name -> lines of its metrics.jsonl.
        cells: name -> runs of a cell of a grid, drawn as mean and standard deviation.
        x: "step" or "tokens".
        factor: of the exponential moving average of training loss and imbalance; those of cells
            have `EMA`.
        comment: in the file (`megasink.report.style.comment_of`).
    """
    cells = cells or {}
    figure, (axes,) = panels(1, 3, 4.2, width=14)
    colors = dict(zip([*runs, *cells], model_colors(len(runs) + len(cells)), strict=True))
    validation = _validation_key(runs, cells)
    for name, lines in runs.items():
        color = colors[name]
        for axis, key in ((axes[0], "lm_loss"), (axes[2], "imbalance")):
            where, values = _series(lines, key, x)
            if not len(values):
                continue
            axis.plot(where, values, color=color, alpha=0.2, linewidth=0.7)
            text = name
            if key == "lm_loss":
                text += _plural(mark_spikes(axis, where, values, color))
            axis.plot(where, smoothed(values, factor), color=color, label=text)
        where, values = _series(lines, validation, x)
        axes[1].plot(where, values, "o-", color=color, label=name)
    for name, cell in cells.items():
        for axis, key in zip(axes, ("lm_loss", validation, "imbalance"), strict=True):
            if (band := band_of(cell, key)) is not None:
                draw_band(
                    axis, band, colors[name], name, _to_tokens(cell) if x == "tokens" else None
                )
    bits = validation == "valid_bits_per_byte"
    titles = (
        (f"training loss (EMA {factor:g})", "nats per token"),
        ("validation", "bits per byte" if bits else "nats per token"),
        (f"head imbalance (EMA {factor:g})", "coefficient of variation"),
    )
    for axis, (title, text) in zip(axes, titles, strict=True):
        label(axis, title, text, x)
    for axis in axes[:2]:
        if axis.lines:
            zoom(axis)
    # Below the spike marks.
    axes[0].legend(loc="upper right", bbox_to_anchor=(1, 0.96))
    save(figure, output, comment)


def _plural(spikes: int) -> str:
    return f" ({spikes} spike{'s' * (spikes != 1)})" if spikes else ""


def _to_tokens(cell: CellResults) -> Callable[[Array], Array]:
    """Return the function from steps to tokens of a cell's runs, whose batches are the same."""
    curves = [run.curves["tokens"] for run in cell.runs.values()]
    steps, tokens = np.asarray(max(curves, key=lambda curve: curve[0][-1] or 0), dtype=float)

    def to_tokens(at: Array) -> Array:
        return np.asarray(np.interp(at, steps, tokens))

    return to_tokens


def _validation_key(runs: dict[str, list[dict[str, Any]]], cells: Mapping[str, CellResults]) -> str:
    """Return bits per byte, comparable across tokenizers, if every validated run has them."""
    of_cells = [
        run.curves
        for cell in cells.values()
        for run in cell.runs.values()
        if "valid_lm_loss" in run.curves
    ]
    validated = [
        line for lines in runs.values() for line in lines if line.get("valid_lm_loss") is not None
    ]
    both = [*validated, *of_cells]
    whole = bool(both) and all("valid_bits_per_byte" in of for of in both)
    return "valid_bits_per_byte" if whole else "valid_lm_loss"


def _series(
    lines: list[dict[str, Any]], key: str, x: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps, values = series(lines, key)
    if x == "step":
        return steps, values
    # Evaluation lines hold only their step.
    tokens = {line["iteration"]: line["tokens"] for line in lines if "tokens" in line}
    known = np.asarray([step in tokens for step in steps], dtype=bool)
    return np.asarray([tokens[step] for step in steps[known]], dtype=float), values[known]


def summary(lines: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the numbers to compare, as in a grid's table.

    Final values and counts; those of `SMOOTHED` are moving averages (factor `EMA`).
    """
    _, loss = series(lines, "lm_loss")
    _, seconds = series(lines, "seconds")
    _, tokens = series(lines, "tokens")
    found: dict[str, float | None] = {
        "steps": float(len(loss)),
        "loss": float(smoothed(loss)[-1]),
        "spikes": float(len(loss_spikes(loss))),
    }
    for name in ("validation", "bits/byte", "imbalance"):
        _, values = series(lines, COLUMNS[name])
        values = smoothed(values) if COLUMNS[name] in SMOOTHED else values
        found[name] = float(values[-1]) if len(values) else None
    per_step = np.diff(tokens, prepend=0.0)
    speed = len(seconds) == len(per_step) and len(seconds) > 0
    found["tokens/s"] = float(np.median(per_step / seconds)) if speed else None
    return found
