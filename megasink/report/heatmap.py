"""The [layer, head] picture of head importance.

Shapes: L layers, H query heads.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# So many numbers can still be read in their cells.
_READABLE = 96


def draw_importance(figure: Any, axis: Any, importance_LH: NDArray[np.float64], title: str) -> None:
    """Draw a heatmap with labelled axes and a colour bar on an axis of a matplotlib figure.

    Args:
        importance_LH: mean gates; NaN, drawn grey, for layers that have none.
    """
    # Down to a round number, so that runs of one kind mostly share a scale.
    known = importance_LH[np.isfinite(importance_LH)]
    lowest = min(0.9, float(np.floor(known.min() * 10) / 10)) if known.size else 0.9
    axis.set_facecolor("0.8")
    image = axis.imshow(importance_LH, vmin=lowest, vmax=1, cmap="viridis", aspect="auto")
    layers, heads = importance_LH.shape
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_xticks(range(0, heads, max(1, heads // 8)))
    axis.set_yticks(range(0, layers, max(1, layers // 10)))
    if importance_LH.size <= _READABLE:
        for (layer, head), value in np.ndenumerate(importance_LH):
            colour = "white" if value - lowest < 0.6 * (1 - lowest) else "black"
            axis.text(head, layer, f"{value:.2f}", ha="center", va="center", color=colour, size=7)
    figure.colorbar(image, ax=axis, label="closed <- gate -> open")


def importance_picture(importance_LH: NDArray[np.float64], title: str) -> NDArray[np.uint8]:
    """The heatmap by itself, [height, width, RGB] in 0 to 255.

    Nothing global of matplotlib is touched: it is drawn in the middle of training.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, heads = importance_LH.shape
    # Cells of about a third of an inch, within a page.
    size = (min(max(0.34 * heads, 4.0), 14.0) + 1.8, min(max(0.24 * layers, 2.4), 12.0) + 1.0)
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw_importance(figure, figure.add_subplot(), importance_LH, title)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
