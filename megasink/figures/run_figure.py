"""The figure of a run: loss, bits per byte, head imbalance, and the importance heatmap."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.errors import UserError
from megasink.figures.importance_heatmap import draw_importance
from megasink.figures.loss_spikes import MovingAverage, loss_spikes
from megasink.figures.run_metrics import read_metrics
from megasink.figures.style import BLUE, GRAY, VERMILION, label, note, panels, save, styled
from megasink.files.json_file import read_object
from megasink.megatron.hybrid_pattern import count_blocks

EMA = 0.9
"""Decay factor of moving averages (P1.41)."""
SMOOTHED = ("lm_loss", "imbalance")
"""Metrics whose curves and final values are moving averages."""


def smoothed(values: NDArray[np.float64], factor: float = EMA) -> NDArray[np.float64]:
    """Return the values smoothed by `MovingAverage`; non-finite ones stay, and do not enter it."""
    average = MovingAverage(factor)  # scipy.signal takes seconds to import
    return np.asarray([average(value) if np.isfinite(value) else value for value in values])


def series(
    lines: list[dict[str, Any]], key: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (iterations, values) of the numbers under ``key``, the last for each iteration."""
    if key == "lm_loss":  # as `loss_spikes` in metrics.jsonl: a skipped step trained nothing
        lines = [line for line in lines if not line.get("skipped")]
    values = {line["iteration"]: line[key] for line in lines if line.get(key) is not None}
    return np.asarray(list(values), dtype=float), np.asarray(list(values.values()), dtype=float)


def draw_run(run_dir: Path) -> Path:
    """Draw the figure of a run to RUN/curves.png, and return its path."""
    output = run_dir / "curves.png"
    with styled():
        save(figure_of(run_dir, read_metrics(run_dir)), output)
    return output


@styled()
def figure_of(run_dir: Path, lines: list[dict[str, Any]]) -> Any:
    """Return the figure of a run, of the lines of its metrics.jsonl."""
    count = 3 + any(line.get("valid_bits_per_byte") is not None for line in lines)
    figure, (axes,) = panels(1, count, 4.2, width=14 / 3 * count)
    _draw_loss(axes[0], lines)
    if count == 4:
        steps, bits = series(lines, "valid_bits_per_byte")
        axes[1].plot(steps, bits, "o-", color=VERMILION)
        title = f"validation: {bits[-1]:.3f} at step {steps[-1]:.0f}"
        label(axes[1], title, "bits per byte", "step")
    _draw_imbalance(axes[-2], lines)
    title, measured = "head importance (mean gate)", [of for of in lines if "importance" in of]
    if measured:
        last = measured[-1]
        importance_LH = np.asarray(last["importance"], dtype=float)
        title += f", step {last['iteration']}"
        draw_importance(figure, axes[-1], importance_LH, title, layers=last.get("layers"))
    else:
        label(axes[-1], title)
        note(axes[-1], "no gates recorded")
    figure.suptitle(_title(run_dir), fontsize=11)
    return figure


def _title(run_dir: Path) -> str:
    config = run_dir / "config.json"
    if not config.is_file():
        return run_dir.name
    content = read_object(config)
    try:
        a = content["arguments"]
        return (
            f"{run_dir.name}: {a['attention_variant']} attention, {count_blocks(a)} layers, "
            f"{a['num_attention_heads']} heads, d {a['hidden_size']}, "
            f"head-balance coefficient {a['head_balance_coeff']:g}"
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{config} does not describe a run ({error!r})") from error


def _draw_loss(axis: Any, lines: list[dict[str, Any]]) -> None:
    steps, loss = series(lines, "lm_loss")
    axis.plot(steps, loss, color=BLUE, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smoothed(loss), color=BLUE, label="training, moving average")
    valid_steps, valid = series(lines, "valid_lm_loss")
    if len(valid):
        axis.plot(valid_steps, valid, "o-", color=VERMILION, label="validation")
    mark_spikes(axis, steps, loss, BLUE)
    label(axis, "language-model loss", "nats per token", "step")
    axis.legend()


def mark_spikes(
    axis: Any, steps: NDArray[np.float64], loss: NDArray[np.float64], color: Any
) -> int:
    """Mark the loss spikes at the upper edge of the axis; return their number."""
    spikes = loss_spikes(loss)
    if spikes:
        height = np.full(len(spikes), 0.97)
        edge = axis.get_xaxis_transform()  # data along x, the axis itself along y
        axis.scatter(steps[spikes], height, marker="v", color=color, s=25, transform=edge)
    return len(spikes)


def _draw_imbalance(axis: Any, lines: list[dict[str, Any]]) -> None:
    rows = [line for line in lines if "imbalance_per_layer" in line]
    label(axis, "head imbalance (CV of head importance)", "coefficient of variation", "step")
    if not rows:
        note(axis, "no gates recorded")
        return
    steps = np.asarray([row["iteration"] for row in rows], dtype=float)
    for layer in np.asarray([row["imbalance_per_layer"] for row in rows], dtype=float).T:
        axis.plot(steps, layer, color=GRAY, alpha=0.35, linewidth=0.8)
    axis.plot([], [], color=GRAY, alpha=0.6, linewidth=0.8, label="each layer")
    mean_steps, mean = series(lines, "imbalance")
    axis.plot(mean_steps, mean, color=BLUE, alpha=0.3, linewidth=0.8)
    axis.plot(mean_steps, smoothed(mean), color=BLUE, label="mean over layers, moving average")
    axis.set_ylim(bottom=0)
    axis.legend()
