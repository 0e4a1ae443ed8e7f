"""Compare runs on one page: smoothed training loss, validation, head imbalance, and a table."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.report.curves import mark_spikes, series, smoothed
from megasink.report.spikes import loss_spikes
from megasink.report.style import label, model_colors, panels, save, styled

AXES = ("step", "tokens")


@styled()
def draw_comparison(
    runs: dict[str, list[dict[str, Any]]], output: Path, *, x: str = "step", factor: float = 0.9
) -> None:
    """Draw the curves of several runs in the same axes (P0.20, P1.41).

    Args:
        runs: name -> lines of its metrics.jsonl.
        x: "step" or "tokens".
        factor: of the exponential moving average of training loss and imbalance.
    """
    figure, (axes,) = panels(1, 3, 4.2, width=14)
    for color, (name, lines) in zip(model_colors(len(runs)), runs.items(), strict=True):
        for axis, key in ((axes[0], "lm_loss"), (axes[2], "imbalance")):
            where, values = _series(lines, key, x)
            if not len(values):
                continue
            axis.plot(where, values, color=color, alpha=0.2, linewidth=0.7)
            text = name
            if key == "lm_loss":
                text += _plural(mark_spikes(axis, where, values, color))
            axis.plot(where, smoothed(values, factor), color=color, label=text)
        where, values = _series(lines, _validation_key(runs), x)
        axes[1].plot(where, values, "o-", color=color, label=name)
    bits = _validation_key(runs) == "valid_bits_per_byte"
    titles = (
        (f"training loss (EMA {factor:g})", "nats per token"),
        ("validation", "bits per byte" if bits else "nats per token"),
        (f"head imbalance (EMA {factor:g})", "coefficient of variation"),
    )
    for axis, (title, text) in zip(axes, titles, strict=True):
        label(axis, title, text, x)
    for axis in axes[:2]:
        if axis.lines:
            _zoom(axis)
    # Below the spike marks.
    axes[0].legend(loc="upper right", bbox_to_anchor=(1, 0.96))
    save(figure, output)


def _plural(spikes: int) -> str:
    return f" ({spikes} spike{'s' * (spikes != 1)})" if spikes else ""


def _zoom(axis: Any) -> None:
    """Exclude the first tenth of the curves from the scale: all runs start equally high."""
    tails = [line.get_ydata()[len(line.get_ydata()) // 10 :] for line in axis.lines]
    values = np.concatenate([np.asarray(tail, dtype=float) for tail in tails])
    values = values[np.isfinite(values)]
    if len(values) and values.max() > values.min():
        margin = 0.05 * (values.max() - values.min())
        axis.set_ylim(values.min() - margin, values.max() + margin)


def _validation_key(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return bits per byte, comparable across tokenizers, if every validated run has them."""
    validated = [
        line for lines in runs.values() for line in lines if line.get("valid_lm_loss") is not None
    ]
    whole = bool(validated) and all("valid_bits_per_byte" in line for line in validated)
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
    """Return the numbers to compare: final values (loss smoothed by 0.9) and counts."""
    _, loss = series(lines, "lm_loss")
    _, seconds = series(lines, "seconds")
    _, tokens = series(lines, "tokens")
    found: dict[str, float | None] = {
        "steps": float(len(loss)),
        "loss": float(smoothed(loss)[-1]),
        "spikes": float(len(loss_spikes(loss))),
    }
    for name, key in (
        ("validation", "valid_lm_loss"),
        ("bits/byte", "valid_bits_per_byte"),
        ("imbalance", "imbalance"),
    ):
        _, values = series(lines, key)
        found[name] = float(values[-1]) if len(values) else None
    per_step = np.diff(tokens, prepend=0.0)
    speed = len(seconds) == len(per_step) and len(seconds) > 0
    found["tokens/s"] = float(np.median(per_step / seconds)) if speed else None
    return found
