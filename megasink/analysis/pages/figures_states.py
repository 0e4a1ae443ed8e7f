"""Figures of hidden states: one panel per model, one curve for each of some positions."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from megasink.analysis.analysis import Analysis
from megasink.analysis.pages.drawing import Drawing
from megasink.figures.recorded import curve
from megasink.figures.style import (
    even_panels,
    label,
    legend,
    log_scale,
    position_colors,
    whole_numbers,
    wrapped,
)

POSITIONS = (0, 1, 2, 4, 8, 16, 32)


def _by_position(key: str, ylabel: str, analyses: Sequence[Analysis]) -> Any:
    """Draw states along x, one curve for each of some positions, one panel per model."""
    analyses = [analysis for analysis in analyses if analysis.has(key)]
    if not analyses:
        return None
    figure, axes = even_panels(len(analyses), 3, 3.4, sharey=True)
    for axis, analysis in zip(axes, analyses, strict=True):
        table = analysis.values(key)
        state = np.arange(len(table)) / 2
        reached = [p for p in POSITIONS if p < table.shape[1] and np.isfinite(table[:, p]).any()]
        for position, color in zip(reached, position_colors(len(reached)), strict=True):
            there = np.isfinite(table[:, position])
            x, y = state[there], table[there, position]
            width, order = (2.2, 3) if position == 0 else (1.2, 2)
            name = f"token {position}"
            curve(axis, x, y, "-", name, color=color, linewidth=width, zorder=order)
            if len(x) <= 81:
                size = 4 if len(x) <= 33 else 2.2
                for points, fill in ((x == np.floor(x), color), (x != np.floor(x), "white")):
                    style = {"color": color, "mfc": fill, "mew": 0.8, "ms": size, "zorder": 4}
                    axis.plot(x[points], y[points], "o", **style)
        label(axis, wrapped(analysis.name), ylabel, "layer (half: after attention)")
        whole_numbers(axis.xaxis)
    if key == "state_norm":
        log_scale(*axes)
    else:
        axes[0].set_ylim(-0.25, 1.05)
    legend(figure, axes[0], len(POSITIONS))
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
        "i != j (P4.5): 1 means that the state no longer depends on the input. Circles as above.",
        partial(_by_position, "cosine_across_inputs", "mean cosine"),
    ),
)
