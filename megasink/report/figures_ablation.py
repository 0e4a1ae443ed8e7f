"""Points of the first tokens with each head of a layer ablated in turn (P4.7)."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from megasink.report.style import MAP, VERMILION, label, panels, styled, whole_numbers

COLUMNS = 3


@styled()
def draw_ablated(
    points: Mapping[int | None, Mapping[str, NDArray[Any]]], layer: int, name: str = "mlp0_tsne_N2"
) -> Any:
    """Draw one panel for the whole model, and one for each ablated head.

    Args:
        points: head -> arrays of `megasink.probe.geometry.project`; None: nothing is ablated.
        layer: of the heads.
        name: which of the arrays.

    Raises:
        ValueError: the model has no such array.
    """
    if any(name not in arrays for arrays in points.values()):
        raise ValueError(f"no {name}: the MLP of block 0 has no such activations")
    rows = -(-len(points) // COLUMNS)
    figure, axes = panels(rows, COLUMNS, 3.2 * rows)
    for axis, (head, arrays) in zip(axes.flat, points.items(), strict=False):
        position_N = arrays["position_N"]
        first_N = position_N == 0
        dots = axis.scatter(
            *arrays[name][~first_N].T, c=position_N[~first_N], cmap=MAP, s=14, alpha=0.85, lw=0
        )
        axis.scatter(
            *arrays[name][first_N].T, s=60, marker="*", color=VERMILION, ec="black", lw=0.4
        )
        title = "no head ablated" if head is None else f"without head {layer}.{head}"
        label(axis, title, "t-SNE 2", "t-SNE 1")
    for axis in list(axes.flat)[len(points) :]:
        axis.set_axis_off()
    bar = figure.colorbar(dots, ax=list(axes.flat), label="token position (star: token 0)")
    whole_numbers(bar.ax.yaxis)
    return figure
