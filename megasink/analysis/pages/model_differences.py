"""Show the differences between two models: in words, as a map of heads, and as a column.

Shapes: L layers, H query heads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megasink.analysis.analysis_object import Analysis
from megasink.analysis.metrics import Metric, metrics
from megasink.analysis.pages.drawing import Drawing, drawing
from megasink.figures.style import DIVERGING, heatmap, label, panels

# Metrics of heads whose change is shown, and its description.
_MAPS = {"importance": "head importance", "awft": "a head's attention to the first token"}
DRAWINGS: list[Drawing] = []


def _maps(analyses: Sequence[Analysis]) -> dict[str, str]:
    """Return the metrics shown: importance alone if it is 1 - AWFT, as in vanilla attention."""
    if all(
        np.allclose(a.values("importance"), 1 - a.values("awft"), 0, 1e-6, True) for a in analyses
    ):
        return {"importance": "head importance (1 - attention to the first token)"}
    return _MAPS


def is_pair(analyses: Sequence[Analysis]) -> bool:
    """Return whether there are two analyses with the same layers and heads."""
    return len(analyses) == 2 and (
        analyses[0].results.model.heads == analyses[1].results.model.heads
    )


def in_words(analyses: Sequence[Analysis]) -> list[str]:
    """Return a paragraph on the largest changes between two analyses; none unless of a pair."""
    if not is_pair(analyses):
        return []
    before, after = analyses
    parts = []
    for name, what in _maps(analyses).items():
        one_LH, other_LH = before.values(name), after.values(name)
        moved_LH = np.abs(other_LH - one_LH)
        if np.isnan(moved_LH).all():
            continue
        layer, head = np.unravel_index(np.nanargmax(moved_LH), moved_LH.shape)
        text = metrics()[name].text
        parts.append(
            f"{what} changes by at most {text(float(moved_LH[layer, head]))} (layer {layer}, head "
            f"{head}: from {text(float(one_LH[layer, head]))} to "
            f"{text(float(other_LH[layer, head]))})"
        )
    return [f"From {before.name} to {after.name} {', and '.join(parts)}."] if parts else []


def delta(entry: Metric, before: Any, after: Any) -> str:
    """Return the change of a metric's number with its sign; empty for a name or no number."""
    if not isinstance(before, float) or not isinstance(after, float):
        return ""
    return "+" * (after > before) + entry.text(after - before)


@drawing(DRAWINGS, "change", "Between models", "Change of each head")
def _change(analyses: Sequence[Analysis]) -> Any:
    """The second model less the first: head importance (P0.10), and the mean weight on the first
    token (P3.1). Both color scales are symmetric about no change.
    """
    if not is_pair(analyses):
        return None
    before, after = analyses
    layers = len(before.results.model.heads)
    height = min(max(0.2 * layers, 2.4), 9.0) + 1
    maps = _maps(analyses)
    figure, axes = panels(1, len(maps), height)
    for axis, (name, what) in zip(axes[0], maps.items(), strict=True):
        moved_LH = after.values(name) - before.values(name)
        most = max(float(np.nanmax(np.abs(moved_LH), initial=0.0)), 1e-3)
        axis.set_facecolor("0.8")
        image = heatmap(axis, moved_LH, vmin=-most, vmax=most, cmap=DIVERGING)
        label(axis, what, "layer", "head")
        figure.colorbar(image, ax=axis, label="less <- change -> more")
    return figure
