"""Figures of attention maps and geometry, from the maps.npz of `megasink analyze --maps`.

Shapes: T tokens, S = 1 + T columns, the sink's first.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from megasink.analysis.analysis_object import Analysis, Floats
from megasink.analysis.pages.drawing import Drawing, drawing
from megasink.figures import style
from megasink.figures.recorded_panels import bars, named_axes

_LAYERS, _HEADS = 12, 16  # maximum number of panels
_LABELS = 48  # maximum number of readable token labels
FONT = "DejaVu Sans Mono"  # comes with matplotlib
_MARKS = str.maketrans({"\n": "↵", "\t": "→", "\r": "↵", " ": "␣"})
_MOST = 14
_PART = "\ufffd"  # a token that is part of a character
DRAWINGS: list[Drawing] = []


def draw_map(axis: Any, map_TS: Floats, *, has_sink: bool, rows: Sequence[str] = ()) -> Any:
    """Draw a map on a square-root scale, the sink's weight in a wide column on the left."""
    from matplotlib.colors import PowerNorm

    tokens = len(map_TS)
    options: dict[str, Any] = {"cmap": style.MAP, "norm": PowerNorm(0.5, 0, 1)}
    image = style.heatmap(axis, _seen(map_TS[:, 1:]), rows, **options)
    named_axes(axis, "", "query", "key")
    left = -0.5
    if has_sink:
        wide = max(1.0, 0.05 * tokens)
        left = -0.5 - 1.6 * wide
        style.heatmap(axis, map_TS[:, :1], rows, ["sink"], (left, left + wide), **options)
    axis.set_xlim(left, tokens - 0.5)
    axis.set_ylim(tokens - 0.5, -0.5)
    if has_sink:
        ticks = [tick for tick in axis.get_xticks() if 0 <= tick < tokens]
        axis.set_xticks([left + wide / 2, *ticks], ["\nsink", *(f"{tick:g}" for tick in ticks)])
    return image


def _seen(weights: Floats) -> Floats:
    """Return weights with NaN for none, such as those of future keys."""
    return np.where(weights == 0.0, np.nan, weights)


def has_sink(maps: dict[str, Any]) -> bool:
    """Return whether any map gives weight to a sink or bias."""
    return bool(np.nanmax(maps["layer_map_LTS"][..., 0]) > 0)


def _color_bar(figure: Any, image: Any, place: tuple[float, ...], orientation: str) -> None:
    ticks = [0, 0.01, 0.05, 0.2, 0.5, 1]
    bar = figure.colorbar(image, cax=figure.add_axes(place), orientation=orientation)
    bar.set_label("attention weight")
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])


def _spread(items: Any, most: int) -> Any:
    """Return at most so many entries, evenly spaced."""
    return items[np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


@drawing(DRAWINGS, "layer_maps", "Geometry", "Attention map of each layer", by_model=True)
def _layers(analysis: Analysis) -> Any:
    """Mean of A_ij over heads and samples (P1.34, P4.2), colors on a square-root scale that all
    maps share. The weight of a sink or bias is an additional column; keys without any weight, such
    as those that a query cannot see, are blank. At most twelve layers.
    """
    if not analysis.maps:
        return None
    maps = analysis.maps["layer_map_LTS"]
    shown = _spread(np.flatnonzero(maps.any((1, 2))), _LAYERS)
    return _map_grid(analysis, maps[shown], [f"layer {layer}" for layer in shown], 6)


_OF_HEADS = "Heads of the first attention layer"


@drawing(DRAWINGS, "first_layer_maps", "Geometry", _OF_HEADS, by_model=True)
def _first_layer(analysis: Analysis) -> Any:
    """Mean map of each head over samples, local heads first (P4.8): by the mean distance sum_j A_ij
    (i - j) / sum_j A_ij over the last half of the rows, given above each map.
    """
    if not analysis.maps:
        return None
    maps = analysis.maps["first_layer_map_HTS"]
    distance = mean_distance(maps)
    shown = _spread(np.argsort(distance, kind="stable"), _HEADS)
    layer = int(analysis.maps["first_layer"])
    titles = [f"{layer}.{head}: {distance[head]:.1f} tokens" for head in shown]
    return _map_grid(analysis, maps[shown], titles, 6 if len(shown) > 8 else 4)


def mean_distance(map_HTS: Floats) -> Floats:
    """Return [H]: mean of i - j, weighted by A_ij over the keys, over the last half of the rows."""
    position = np.arange(map_HTS.shape[1])  # in the first half every head looks local
    rows = position[len(position) // 2 :]
    weights = map_HTS[:, rows, 1:]
    total = weights.sum((1, 2))
    apart = (weights * (rows[:, None] - position)).sum((1, 2))
    return apart / np.where(total > 0, total, 1)


def _map_grid(analysis: Analysis, maps: Floats, titles: Sequence[str], most: int) -> Any:
    rows, columns = style.grid(len(maps), most)
    # Inches: size of a map, gaps between maps, and margins.
    apart, above, left, right, top, bottom = 0.15, 0.32, 0.65, 0.95, 0.3, 0.6
    size = min((style.WIDTH - left - right + apart) / columns - apart, 2.4)
    width = left + columns * (size + apart) - apart + right
    height = top + rows * (size + above) - above + bottom
    figure, axes = style.panels(
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


_COMPONENTS = "Principal components of all attention maps"


@drawing(DRAWINGS, "map_components", "Geometry", _COMPONENTS, by_model=True)
def _components(analysis: Analysis) -> Any:
    """The maps of all layers and heads on one input, flattened and centered: the first two
    components with their share of the variance, and every head's coordinates (P3.27).
    """
    maps = analysis.maps
    if "component_KTS" not in maps:
        return None
    images, share = maps["component_KTS"], maps["component_share_K"]
    figure, axes = style.panels(1, 3, 3.5)
    highest = float(np.abs(images).max())
    for index, (axis, picture) in enumerate(zip(axes[0, :2], images, strict=False)):
        image = style.heatmap(
            axis, _seen(picture), cmap=style.DIVERGING, vmin=-highest, vmax=highest
        )
        title = f"PC {index + 1}: {100 * share[index]:.0f}% of the variance"
        style.label(axis, title, "query", "key")
    figure.colorbar(image, ax=axes[0, :2].tolist(), label="component entry")
    points, heads = maps["component_point_MK"], maps["component_head_M2"]
    dots = axes[0, 2].scatter(*points[:, :2].T, c=heads[:, 0], cmap=style.MAP, s=16, alpha=0.85)
    style.label(axes[0, 2], "all heads", "PC 2", "PC 1")
    bar = figure.colorbar(dots, ax=axes[0, 2], label="layer")
    style.whole_numbers(bar.ax.yaxis)
    return figure


@drawing(DRAWINGS, "states", "Geometry", "First positions in the first layers", by_model=True)
def _points(analysis: Analysis) -> Any:
    """States after the norm before the MLP of layer 1 by PCA (P4.9), and activations inside the MLP
    of layer 0 by t-SNE (P4.6), one point per token, colored by position.
    """
    arrays = analysis.points
    kinds = [
        ("normed_pca_N2", "normed state before the MLP of layer 1: PCA", "PC"),
        ("mlp0_tsne_N2", "MLP activations of layer 0: t-SNE", "t-SNE"),
    ]
    kinds = [kind for kind in kinds if kind[0] in arrays]
    if not kinds or "position_N" not in arrays:
        return None
    figure, axes = style.panels(1, 2, 4.2)
    for axis, (key, title, name) in zip(axes[0], kinds, strict=False):
        dots = style.by_position(axis, arrays[key], arrays["position_N"], 14, 60)
        style.label(axis, title, f"{name} 2", f"{name} 1")
        axis.legend(loc="best")
    bar = figure.colorbar(dots, ax=axes[0].tolist(), label="token position")
    style.whole_numbers(bar.ax.yaxis)
    for axis in axes[0, len(kinds) :]:
        axis.set_axis_off()
    return figure


def heads_of(analysis: Analysis) -> list[str]:
    """Return the heads to show, as LAYER.HEAD."""
    if not analysis.maps:
        return []
    return [f"{layer}.{head}" for layer, head in analysis.maps["head_C2"]]


@drawing(DRAWINGS, "head", "Geometry", "Single heads", by_model=True)
def _head(analysis: Analysis, index: int | None = None) -> Any:
    """Left: A_ij on one input, and by token the norms of value and head output g o_i and the gate G
    (P3.25, P3.26). Right: joint PCA of the head's queries and keys on the whole input, centered,
    after rotary embeddings and query-key norms; the star is k_0 (P0.26). #7 stands for
    token 7 if it is only part of a character, or if this machine has no font for it.
    """
    if index is None:  # a picture for each chosen head
        return None
    maps = analysis.maps
    layer, head = maps["head_C2"][index]
    tokens, fonts = token_labels([str(text) for text in maps["token_T"]], maps.get("token_id_T"))
    margins = {"left": 0.095, "right": 0.66, "top": 0.95, "bottom": 0.21, "wspace": 0.09}
    widths = {"width_ratios": (4.2, 1, 1, 1)}
    figure, (axes,) = style.panels(
        1, 4, 5.6, layout=None, sharey=True, gridspec_kw=margins | widths
    )
    names = tokens if len(tokens) <= _LABELS else ()
    image = draw_map(axes[0], maps["map_CTS"][index], has_sink=has_sink(maps), rows=names)
    if names:
        size = min(7.0, 265 / len(tokens))
        axes[0].set_yticks(range(len(tokens)), tokens, fontsize=size, family=fonts)
        axes[0].tick_params(axis="y", length=0, pad=1)
    style.label(axes[0], f"attention of head {head}, layer {layer}", "query", "key")
    by_token = (
        ("value_norm_CT", "value", style.GRAY),
        ("output_norm_CT", "output", style.BLUE),
        ("gate_CT", "gate", style.GREEN),
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
    axis.scatter(*query.T, s=9, color=style.BLUE, alpha=0.6, linewidth=0, label="queries")
    axis.scatter(*key[1:].T, s=9, color="#E69F00", alpha=0.7, linewidth=0, label="keys")
    axis.scatter(
        *key[:1].T,
        s=170,
        marker="*",
        color=style.VERMILION,
        ec="black",
        lw=0.7,
        zorder=4,
        label="first key",
    )
    axis.set_aspect("equal", adjustable="datalim")
    style.label(axis, "queries and keys", *(f"PC {i + 1} ({100 * share[i]:.0f}%)" for i in (1, 0)))
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, handletextpad=0.2)


def token_labels(texts: Sequence[str], ids: Any) -> tuple[list[str], list[str]]:
    """Return a label for each token, #ID for one that no font draws, and the fonts to use."""
    fonts, labels = [FONT], []
    for number, text in enumerate(texts):
        text = text.translate(_MARKS)
        label = text if len(text) <= _MOST else f"{text[: _MOST - 2]}…"
        missing = {ord(c) for c in label} - _characters(FONT)
        candidates = [font for font in fonts[1:] if missing <= _characters(font)]
        candidates = candidates or [font for font in _others() if missing <= _characters(font)]
        if missing and candidates and candidates[0] not in fonts:
            fonts.append(candidates[0])
        if _PART in label or (missing and not candidates):
            label = "▯" if ids is None else f"#{ids[number]}"
        labels.append(label)
    return labels, fonts


@cache
def _others() -> tuple[str, ...]:
    """Return the names of the machine's other fonts, except those that draw only boxes."""
    from matplotlib import font_manager

    names = sorted({font.name for font in font_manager.fontManager.ttflist})
    return tuple(name for name in names if "Last Resort" not in name and name != FONT)


@cache
def _characters(font: str) -> frozenset[int]:
    """Return the characters for which a font has outlines; emoji may be pictures."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    try:
        file: Any = get_font(findfont(FontProperties(family=font), fallback_to_default=False))
        return frozenset(file.get_charmap()) if file.scalable else frozenset()
    except (OSError, RuntimeError, ValueError):  # a font that cannot be read
        return frozenset()
