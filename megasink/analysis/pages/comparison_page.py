"""Compare runs on one page: smoothed training loss, validation, head imbalance, and a table."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.pages import html
from megasink.analysis.pages.drawing import picture_of
from megasink.figures.loss_spikes import loss_spikes
from megasink.figures.recorded_panels import curve
from megasink.figures.run_figure import EMA, SMOOTHED, mark_spikes, series, smoothed
from megasink.figures.style import DASHES, label, model_colors, note, panels, styled, zoom
from megasink.files.atomic import atomic_files
from megasink.files.system_errors import writing

Runs = dict[str, list[dict[str, Any]]]
COLUMNS = {
    "steps": "steps",
    "loss": "lm_loss",
    "spikes": "spikes",
    "validation": "valid_lm_loss",
    "bits/byte": "valid_bits_per_byte",
    "imbalance": "imbalance",
}
"""Column of `summary` -> metric of metrics.jsonl, or a count."""


@styled()
def draw_comparison(runs: Runs, *, x: str = "step", factor: float = EMA) -> Any:
    """Draw the curves of several runs by step or tokens, smoothed by `factor` (P0.20, P1.41)."""
    figure, (axes,) = panels(1, 3, 4.2, width=14)
    colors = dict(zip(runs, model_colors(len(runs)), strict=True))
    every = [line for lines in runs.values() for line in lines]
    validated = [line for line in every if line.get("valid_lm_loss") is not None]
    # Bits per byte, comparable across tokenizers, if every validated run has them.
    bits = bool(validated) and all("valid_bits_per_byte" in line for line in validated)
    validation = "valid_bits_per_byte" if bits else "valid_lm_loss"
    for (name, lines), dashes in zip(runs.items(), cycle(DASHES), strict=False):
        color = colors[name]
        for axis, key in ((axes[0], "lm_loss"), (axes[2], "imbalance")):
            where, values = _series(lines, key, x)
            if not len(values):
                continue
            axis.plot(where, values, color=color, alpha=0.2, linewidth=0.7)
            text = name
            if key == "lm_loss" and (spikes := mark_spikes(axis, where, values, color)):
                text += f" ({spikes} spike{'s' * (spikes != 1)})"
            curve(axis, where, smoothed(values, factor), name=text, color=color, linestyle=dashes)
        where, values = _series(lines, validation, x)
        curve(axes[1], where, values, "o", name, color=color, linestyle=dashes)
    titles = (
        (f"training loss, moving average ({factor:g})", "nats per token"),
        ("validation", "bits per byte" if bits else "nats per token"),
        (f"head imbalance, moving average ({factor:g})", "coefficient of variation"),
    )
    for axis, (title, text) in zip(axes, titles, strict=True):
        label(axis, title, text, x)
    for axis in axes:
        if not any(len(line.get_xdata()) for line in axis.lines):
            note(axis, "not measured")
        elif axis is not axes[2]:
            zoom(axis)
    # Below the spike marks.
    axes[0].legend(loc="upper right", bbox_to_anchor=(1, 0.96))
    return figure


_TITLE = "Curves"
_CAPTION = (
    "Moving averages of training loss and head imbalance (the coefficient of variation of head "
    "importance, P0.13). Faint lines show raw values, and triangles loss spikes (P1.23). The "
    "validation loss is not smoothed."
)


def write_comparison(runs: Runs, figure: Any, output: Path, *, comment: str | None = None) -> None:
    """Write the picture of runs, and beside it the page, with the table of their final numbers."""
    with styled():
        picture = picture_of(figure, output.stem, _TITLE, _CAPTION, comment=comment)
    names = ", ".join(runs)
    made = html.Page(f"megasink compare: {names}", names, comment or "")
    made.section("Final numbers", html.table(*final_numbers(runs)))
    made.section(_TITLE, html.figure(picture, f"{_TITLE}: {names}", picture.caption))
    with writing(f"--output {output}"), atomic_files(output.parent) as folder:
        (folder / output.name).write_bytes(picture.files["png"])
        (folder / output.with_suffix(".html").name).write_text(
            made.text(), errors="backslashreplace"
        )


def final_numbers(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table of `summary` of each run."""
    rows = []
    for name, lines in runs.items():
        numbers = summary(lines)
        counts = ("steps", "spikes", "tokens/s")
        cells = (
            "-" if value is None else f"{value:,.0f}" if key in counts else f"{value:.4f}"
            for key, value in numbers.items()
        )
        rows.append([name, *cells])
    return ["run", *COLUMNS, "tokens/s"], rows


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
    """Return final values, moving averages (factor `EMA`) of those in `SMOOTHED`, and counts."""
    _, loss = series(lines, "lm_loss")
    _, seconds = series(lines, "seconds")
    _, tokens = series(lines, "tokens")
    numbers: dict[str, float | None] = {
        "steps": float(
            len({line["iteration"] for line in lines if line.get("lm_loss") is not None})
        ),
        "loss": float(smoothed(loss)[-1]) if len(loss) else None,
        "spikes": float(len(loss_spikes(loss))),
    }
    for name in ("validation", "bits/byte", "imbalance"):
        _, values = series(lines, COLUMNS[name])
        values = smoothed(values) if COLUMNS[name] in SMOOTHED else values
        numbers[name] = float(values[-1]) if len(values) else None
    per_step = np.diff(tokens, prepend=0.0)
    speed = len(seconds) == len(per_step) and len(seconds) > 0
    numbers["tokens/s"] = float(np.median(per_step / seconds)) if speed else None
    return numbers
