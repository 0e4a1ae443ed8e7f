"""The [layer, head] heatmap of head importance.

Shapes: L layers, H query heads.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.figures import style

# Maximum number of cells with readable numbers.
_READABLE = 96


def draw_importance(
    figure: Any,
    axis: Any,
    importance_LH: NDArray[np.float64],
    title: str,
    lowest: float | None = None,
    layers: Sequence[int] | None = None,
) -> None:
    """Draw a heatmap of mean gates (NaN is gray) with a color bar and rows named `layers`."""
    lowest = _lowest(importance_LH) if lowest is None else lowest
    axis.set_facecolor("0.8")
    image = style.heatmap(axis, importance_LH, vmin=lowest, vmax=1, cmap=style.MAP)
    style.label(axis, title, "layer", "head")
    if layers is not None:
        axis.set_yticks(range(len(layers)), layers)
    if importance_LH.size <= _READABLE:
        style.write_cells(axis, image, importance_LH, 7)
    figure.colorbar(image, ax=axis, label="mean gate: 0 closed, 1 open")


def draw_importances(
    figure: Any,
    axes: Iterable[Any],
    maps: Sequence[tuple[str, NDArray[np.float64]]],
    layers: Sequence[int] | None = None,
) -> None:
    """Draw heatmaps, of a title and [L, H] each, on one color scale."""
    lowest = min(_lowest(importance_LH) for _, importance_LH in maps)
    for axis, (title, importance_LH) in zip(axes, maps, strict=True):
        draw_importance(figure, axis, importance_LH, title, lowest, layers)


def _lowest(importance_LH: NDArray[np.float64]) -> float:
    """Return where a color scale begins: rounded down, so that similar runs mostly share it."""
    known = importance_LH[np.isfinite(importance_LH)]
    return min(0.9, float(np.floor(known.min() * 10) / 10)) if known.size else 0.9


@style.styled()
def importance_pictures(maps: Sequence[tuple[str, NDArray[np.float64]]]) -> bytes:
    """Return a PNG of titled heatmaps [L, H], which share a color scale."""
    return style.rendered(_figure(maps))


@style.styled()
def importance_picture(
    importance_LH: NDArray[np.float64], title: str, layers: Sequence[int] | None = None
) -> NDArray[np.uint8]:
    """Return one heatmap as an image, [height, width, RGB] in 0 to 255."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(_figure([(title, importance_LH)], layers))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _figure(
    maps: Sequence[tuple[str, NDArray[np.float64]]], layers: Sequence[int] | None = None
) -> Any:
    """Return a figure of heatmaps on one color scale."""
    rows, heads = maps[0][1].shape
    # Cells of about a third of an inch, within a page.
    height = min(max(0.24 * rows, 2.4), 12.0) + 1
    alone = len(maps) == 1
    width = min(max(0.34 * heads, 4.0 if alone else 3.2), 14.0 if alone else 9.0)
    _, columns = style.grid(len(maps), 3)
    figure, axes = style.even_panels(
        len(maps), 3, height, width=columns * (width + 1.2 + 0.6 * alone)
    )
    draw_importances(figure, axes, maps, layers)
    return figure
