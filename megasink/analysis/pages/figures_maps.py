"""Figures of attention maps and geometry, from the maps.npz of `megasink analyze --maps`.

Shapes: T tokens, S = 1 + T columns, the sink's first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megasink.analysis.analysis import Analysis, Floats
from megasink.analysis.pages.drawing import Drawing
from megasink.analysis.pages.token_labels import token_labels
from megasink.figures.recorded import bars, named_axes
from megasink.figures.style import (
    BLUE,
    DIVERGING,
    GRAY,
    GREEN,
    MAP,
    VERMILION,
    WIDTH,
    grid,
    heatmap,
    label,
    panels,
    whole_numbers,
)

_LAYERS, _HEADS = 12, 16  # maximum number of panels
_LABELS = 48  # maximum number of readable token labels


def draw_map(axis: Any, map_TS: Floats, *, has_sink: bool, rows: Sequence[str] = ()) -> Any:
    """Draw a map on a square-root scale, with the sink's weight in a wide column on the left.

    Keys without any weight stay blank: future keys, and those outside a window.
    """
    from matplotlib.colors import PowerNorm

    tokens = len(map_TS)
    options: dict[str, Any] = {"cmap": MAP, "norm": PowerNorm(0.5, 0, 1)}
    keys = np.where(map_TS[:, 1:] == 0.0, np.nan, map_TS[:, 1:])
    image = heatmap(axis, keys, rows, **options)
    named_axes(axis, "", "query", "key")
    left = -0.5
    if has_sink:
        wide = max(1.0, 0.05 * tokens)
        left = -0.5 - 1.6 * wide
        heatmap(axis, map_TS[:, :1], rows, ["sink"], (left, left + wide), **options)
    axis.set_xlim(left, tokens - 0.5)
    axis.set_ylim(tokens - 0.5, -0.5)
    if has_sink:
        ticks = [tick for tick in axis.get_xticks() if 0 <= tick < tokens]
        axis.set_xticks([left + wide / 2, *ticks], ["\nsink", *(f"{tick:g}" for tick in ticks)])
    return image


def has_sink(maps: dict[str, Any]) -> bool:
    """Return whether any map gives weight to a sink or bias."""
    return bool(np.nanmax(maps["layer_map_LTS"][..., 0]) > 0)


def _color_bar(figure: Any, image: Any, place: tuple[float, ...], orientation: str) -> None:
    ticks = [0, 0.01, 0.05, 0.2, 0.5, 1]
    bar = figure.colorbar(image, cax=figure.add_axes(place), orientation=orientation)
    bar.set_label("attention weight")
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])


def _layers(analysis: Analysis) -> Any:
    if not analysis.maps:
        return None
    maps = analysis.maps["layer_map_LTS"]
    present = np.flatnonzero(maps.any((1, 2)))
    shown = present[np.unique(np.linspace(0, len(present) - 1, _LAYERS).round().astype(int))]
    return _map_grid(analysis, maps[shown], [f"layer {layer}" for layer in shown], 6)


def _first_layer(analysis: Analysis) -> Any:
    if not analysis.maps:
        return None
    maps = analysis.maps["first_layer_map_HTS"]
    distance = mean_distance(maps)
    order = np.argsort(distance, kind="stable")
    shown = order[np.unique(np.linspace(0, len(maps) - 1, _HEADS).round().astype(int))]
    layer = int(analysis.maps["first_layer"])
    titles = [f"{layer}.{head}: {distance[head]:.1f} tokens" for head in shown]
    return _map_grid(analysis, maps[shown], titles, 6 if len(shown) > 8 else 4)


def mean_distance(map_HTS: Floats) -> Floats:
    """Return [H]: mean of i - j, weighted by A_ij over the keys, over the last half of the rows.

    The first rows see so few keys that every head looks local there.
    """
    tokens = map_HTS.shape[1]
    position = np.arange(tokens)
    apart = position[:, None] - position
    rows = slice(tokens // 2, None)
    weights = map_HTS[:, rows, 1:]
    total = weights.sum((1, 2))
    mean: Floats = (weights * apart[rows]).sum((1, 2)) / np.where(total > 0, total, 1)
    return mean


def _map_grid(analysis: Analysis, maps: Floats, titles: Sequence[str], most: int) -> Any:
    rows, columns = grid(len(maps), most)
    # Inches: size of a map, gaps between maps, and margins.
    apart, above, left, right, top, bottom = 0.15, 0.32, 0.65, 0.95, 0.3, 0.6
    size = min((WIDTH - left - right + apart) / columns - apart, 2.4)
    width = left + columns * (size + apart) - apart + right
    height = top + rows * (size + above) - above + bottom
    figure, axes = panels(
        rows,
        columns,
        height,
        width=width,
        layout=None,
        sharex=True,
        sharey=True,
        gridspec_kw={
            "left": left / width,
            "right": 1 - right / width,
            "top": 1 - top / height,
            "bottom": bottom / height,
            "wspace": apart / size,
            "hspace": above / size,
        },
    )
    for axis, map_TS, title in zip(axes.flat, maps, titles, strict=False):
        image = draw_map(axis, map_TS, has_sink=has_sink(analysis.maps))
        named_axes(axis, title)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
    for axis in axes.flat[len(maps) :]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("query")
    for axis in axes[-1]:
        axis.set_xlabel("key")
    inside = 1 - (top + bottom) / height
    place = (1 - (right - 0.15) / width, bottom / height, 0.13 / width, inside)
    _color_bar(figure, image, place, "vertical")
    return figure


def heads_of(analysis: Analysis) -> list[str]:
    """Return the heads to show, as LAYER.HEAD."""
    if not analysis.maps:
        return []
    return [f"{layer}.{head}" for layer, head in analysis.maps["head_C2"]]


def draw_head(analysis: Analysis, index: int) -> Any:
    """Draw one head's map, norms and gate by token, queries and keys (P0.26, P3.25, P3.26)."""
    maps = analysis.maps
    layer, head = maps["head_C2"][index]
    tokens, fonts = token_labels([str(text) for text in maps["token_T"]], maps.get("token_id_T"))
    margins = {"left": 0.095, "right": 0.66, "top": 0.95, "bottom": 0.21, "wspace": 0.09}
    widths = {"width_ratios": (4.2, 1, 1, 1)}
    figure, (axes,) = panels(1, 4, 5.6, layout=None, sharey=True, gridspec_kw=margins | widths)
    names = tokens if len(tokens) <= _LABELS else ()
    image = draw_map(axes[0], maps["map_CTS"][index], has_sink=has_sink(maps), rows=names)
    if names:
        size = min(7.0, 265 / len(tokens))
        axes[0].set_yticks(range(len(tokens)), tokens, fontsize=size, family=fonts)
        axes[0].tick_params(axis="y", length=0, pad=1)
    label(axes[0], f"attention of head {head}, layer {layer}", "query", "key")
    by_token = (
        ("value_norm_CT", "value", GRAY),
        ("output_norm_CT", "output", BLUE),
        ("gate_CT", "gate", GREEN),
    )
    for axis, (key, title, color) in zip(axes[1:], by_token, strict=True):
        values = maps[key][index]
        bars(axis, values, names, upright=False, height=0.85, color=color)
        named_axes(axis, title, across="query")
        axis.set_title(title)
        axis.grid(axis="y", visible=False)
        axis.set_xlim(0, 1 if key == "gate_CT" else max(1.05 * float(values.max()), 1e-9))
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("gate" if key == "gate_CT" else "L2 norm")
    _color_bar(figure, image, (0.095, 0.07, 0.565, 0.02), "horizontal")
    _queries_and_keys(figure.add_axes((0.73, 0.21, 0.26, 0.74)), maps, index)
    return figure


def _queries_and_keys(axis: Any, maps: dict[str, Any], index: int) -> None:
    query, key, share = (maps[name][index] for name in ("query_CQ2", "key_CQ2", "share_C2"))
    axis.scatter(*query.T, s=9, color=BLUE, alpha=0.6, linewidth=0, label="queries")
    axis.scatter(*key[1:].T, s=9, color="#E69F00", alpha=0.7, linewidth=0, label="keys")
    axis.scatter(
        *key[:1].T,
        s=170,
        marker="*",
        color=VERMILION,
        ec="black",
        lw=0.7,
        zorder=4,
        label="first key",
    )
    axis.set_aspect("equal", adjustable="datalim")
    label(axis, "queries and keys", *(f"PC {i + 1} ({100 * share[i]:.0f}%)" for i in (1, 0)))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, handletextpad=0.2)


def _components(analysis: Analysis) -> Any:
    maps = analysis.maps
    if "component_KTS" not in maps:
        return None
    images, share = maps["component_KTS"], maps["component_share_K"]
    figure, axes = panels(1, 3, 3.5)
    highest = float(np.abs(images).max())
    for index, (axis, picture) in enumerate(zip(axes[0, :2], images, strict=False)):
        seen = np.where(picture == 0.0, np.nan, picture)
        image = heatmap(axis, seen, cmap=DIVERGING, vmin=-highest, vmax=highest)
        title = f"PC {index + 1}: {100 * share[index]:.0f}% of the variance"
        label(axis, title, "query", "key")
    figure.colorbar(image, ax=axes[0, :2].tolist(), label="component entry")
    points, heads = maps["component_point_MK"], maps["component_head_M2"]
    dots = axes[0, 2].scatter(*points[:, :2].T, c=heads[:, 0], cmap=MAP, s=16, alpha=0.85)
    label(axes[0, 2], "all heads", "PC 2", "PC 1")
    bar = figure.colorbar(dots, ax=axes[0, 2], label="layer")
    whole_numbers(bar.ax.yaxis)
    return figure


def _points(analysis: Analysis) -> Any:
    arrays = analysis.points
    kinds = [
        ("normed_pca_N2", "normed state before the MLP of layer 1: PCA", "PC"),
        ("mlp0_tsne_N2", "MLP activations of layer 0: t-SNE", "t-SNE"),
    ]
    kinds = [kind for kind in kinds if kind[0] in arrays]
    if not kinds or "position_N" not in arrays:
        return None
    position = arrays["position_N"]
    figure, axes = panels(1, 2, 4.2)
    for axis, (key, title, name) in zip(axes[0], kinds, strict=False):
        points = arrays[key]
        first = position == 0
        dots = axis.scatter(
            *points[~first].T, c=position[~first], cmap=MAP, s=14, alpha=0.85, linewidth=0
        )
        axis.scatter(
            *points[first].T, s=60, marker="*", color=VERMILION, ec="black", lw=0.4, label="token 0"
        )
        label(axis, title, f"{name} 2", f"{name} 1")
        axis.legend(loc="best")
    bar = figure.colorbar(dots, ax=axes[0].tolist(), label="token position")
    whole_numbers(bar.ax.yaxis)
    for axis in axes[0, len(kinds) :]:
        axis.set_axis_off()
    return figure


HEAD = Drawing(
    "head",
    "Geometry",
    "Single heads",
    "Left: A_ij on one input, and by token the norms of value and head output g o_i and the gate G "
    "(P3.25, P3.26). Right: joint PCA of the head's queries and keys on the whole input, centered, "
    "after rotary embeddings and query-key norms; the star is k_0 (P0.26). #7 is token 7, "
    "which is part of a character, or which no font of this machine has.",
    lambda analysis: None,
    by_model=True,
)
"""One picture per chosen head, by `draw_head`."""

DRAWINGS = (
    Drawing(
        "layer_maps",
        "Geometry",
        "Attention map of each layer",
        "Mean of A_ij over heads and samples (P1.34, P4.2), colors on a square-root scale that "
        "all maps share. The weight of a sink or bias is an additional column; keys without any "
        "weight, such as those that a query cannot see, are blank. At most twelve layers.",
        _layers,
        by_model=True,
    ),
    Drawing(
        "first_layer_maps",
        "Geometry",
        "Heads of the first attention layer",
        "Mean map of each head over samples, local heads first (P4.8): by the mean distance "
        "sum_j A_ij (i - j) / sum_j A_ij over the last half of the rows, given above each map.",
        _first_layer,
        by_model=True,
    ),
    Drawing(
        "map_components",
        "Geometry",
        "Principal components of all attention maps",
        "The maps of all layers and heads on one input, flattened and centered: the first two "
        "components with their share of the variance, and every head's coordinates (P3.27).",
        _components,
        by_model=True,
    ),
    Drawing(
        "states",
        "Geometry",
        "First positions in the first layers",
        "States after the norm before the MLP of layer 1 by PCA (P4.9), and activations inside the "
        "MLP of layer 0 by t-SNE (P4.6), one point per token, colored by position.",
        _points,
        by_model=True,
    ),
    HEAD,
)
