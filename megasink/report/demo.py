"""The picture of `megasink demo`: two runs that differ in the head-balance loss.

Shapes: L layers, H query heads.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megasink.report.curves import read_metrics, series, smoothed
from megasink.report.heatmap import draw_importance
from megasink.report.style import BLUE, VERMILION, label, panels, save, styled


@styled()
def draw_demo(runs: Mapping[str, Path], output: Path) -> Path:
    """Draw loss, sinks and imbalance by step, and head importance at the end; return the path.

    Args:
        runs: two runs with analyses of the live model, the one without the loss first.
    """
    figure, (axes,) = panels(1, 3 + len(runs), 3.4, width=16)
    names = dict(zip(runs, ("without the loss", "with the loss"), strict=True))
    maps = {}
    for (name, folder), color in zip(runs.items(), (BLUE, VERMILION), strict=True):
        lines = read_metrics(folder)
        steps, loss = series(lines, "lm_loss")
        axes[0].plot(steps, smoothed(loss), color=color, label=names[name])
        axes[1].plot(*series(lines, "analysis_first_token_attention"), "o-", color=color)
        steps, imbalance = series(lines, "imbalance")
        axes[2].plot(steps, imbalance, color=color, alpha=0.2, linewidth=0.7)
        axes[2].plot(steps, smoothed(imbalance), color=color)
        maps[names[name]] = np.asarray(
            [line for line in lines if "importance" in line][-1]["importance"], dtype=float
        )
    label(axes[0], "training loss (EMA 0.9)", "nats per token", "step")
    axes[0].legend()
    label(axes[1], "attention on the first token (F-Attn)", "mean over heads", "step")
    axes[1].set_ylim(bottom=0)
    label(axes[2], "head imbalance", "coefficient of variation", "step")
    axes[2].set_ylim(bottom=0)
    lowest = float(min(np.floor(10 * np.nanmin(of)) / 10 for of in maps.values()))
    for axis, (title, importance_LH) in zip(axes[3:], maps.items(), strict=True):
        draw_importance(figure, axis, importance_LH, f"head importance {title}", lowest)
    save(figure, output)
    return output
