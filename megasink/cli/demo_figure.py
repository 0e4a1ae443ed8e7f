"""The picture of `megasink demo`: two runs that differ in the head-balance loss.

Shapes: L layers, H query heads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.pages.curves import series, smoothed
from megasink.analysis.pages.heatmap import draw_importances
from megasink.analysis.pages.style import BLUE, DASHES, VERMILION, WIDTH, label, save, styled


@styled()
def draw_demo(runs: Mapping[str, list[dict[str, Any]]], output: Path) -> Path:
    """Draw loss, sinks and imbalance by step, and head importance at the end; return the path.

    Args:
        runs: lines of metrics.jsonl of two runs with --log-sink-rate, the one without the loss
            first.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 0.85))[:, 0]
    axes = [*above.subplots(1, 3), *below.subplots(1, len(runs))]
    names = dict(zip(runs, ("without the loss", "with the loss"), strict=True))
    maps = []
    styles = [{"color": BLUE}, {"color": VERMILION, "linestyle": DASHES[1]}]
    for (name, lines), style in zip(runs.items(), styles, strict=True):
        steps, loss = series(lines, "lm_loss")
        axes[0].plot(steps, smoothed(loss), label=names[name], **style)
        axes[1].plot(*series(lines, "valid_sink_rate_first_key"), marker="o", **style)
        steps, imbalance = series(lines, "imbalance")
        axes[2].plot(steps, imbalance, color=style["color"], alpha=0.2, linewidth=0.7)
        axes[2].plot(steps, smoothed(imbalance), **style)
        importance = [line for line in lines if "importance" in line][-1]["importance"]
        maps.append((f"head importance {names[name]}", np.asarray(importance, dtype=float)))
    label(axes[0], "training loss, moving average", "nats per token", "step")
    axes[0].legend()
    label(axes[1], "heads with a sink on the first token", "% of heads", "step")
    axes[1].set_ylim(bottom=0)
    label(axes[2], "head imbalance", "coefficient of variation", "step")
    axes[2].set_ylim(bottom=0)
    draw_importances(below, axes[3:], maps)
    save(figure, output)
    return output
