"""Figures of an ablation: curves, ranks, masks, and the heads of one layer.

Shapes: L layers, H heads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.ablate.curves import kept_level
from megasink.analysis.ablate.results import ALL, RANDOM, UNCHANGED, AblationResults, mean_line
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.drawing import Picture, picture_of
from megasink.figures.recorded import bars, curve
from megasink.figures.style import (
    BLUE,
    GRAY,
    MAP,
    PALETTE,
    VERMILION,
    even_panels,
    heatmap,
    label,
    legend,
    panels,
    shares_of_heads,
    short,
    styled,
    whole_numbers,
)

Arrays = Mapping[str, NDArray[np.float64]]
"""Label of a point -> [L, H], the share of samples in which each head was zeroed, NaN for none; or
[N, 2], t-SNE."""

_X = "% of heads zeroed"
_SEVERAL = 8
"""Panels of curves on the page; the other datasets are in ablation.csv."""


def title_of(score: str) -> str:
    """Return the name of a score in figures and tables."""
    return "random heads" if score == RANDOM else metrics()[score].title


def shown_on(results: AblationResults) -> list[str]:
    """Return the datasets or tasks, all texts together first."""
    names = list(results.unchanged.values)
    return sorted(names, key=lambda name: name != ALL)


def draw_curves(results: AblationResults) -> Any:
    """Draw accuracy or loss against heads zeroed (Figure 4 of P3); None without scores.

    The band is the range over the seeds of the random baseline.
    """
    if not results.scores:
        return None
    names = shown_on(results)[:_SEVERAL]
    bits = results.unchanged.values[names[0]].bits_per_byte
    count = len(names) + (bits is not None)
    figure, axes = even_panels(count, 3 if count > 4 else 2, 3.9)
    for axis, name in zip(axes, names, strict=False):
        _curves(axis, results, name, lambda point, name=name: point.number(name))
        baseline = results.unchanged.number(name)
        level = kept_level(baseline, higher_is_better=results.higher_is_better)
        axis.axhline(level, color=GRAY, linestyle=":", linewidth=1)
        label(axis, short(name, 48), results.quantity, _X)
    if bits is not None:
        name = names[0]
        _curves(axes[-1], results, name, lambda p: _bits(p, name))
        label(axes[-1], short(name, 48), "bits per byte", _X)
    legend(figure, axes[0])
    return figure


def _bits(point: Any, name: str) -> float:
    bits = point.values[name].bits_per_byte
    return np.nan if bits is None else bits


def _curves(axis: Any, results: AblationResults, name: str, number: Any) -> None:
    axis.axhline(number(results.unchanged), color=GRAY, linestyle="--", linewidth=1)
    for score in results.scores:
        line = results.line(score)
        x, _ = mean_line(line, name)
        by_seed = [[number(point) for point in points] for points in line.values()]
        y = [float(np.mean(values)) for values in by_seed]
        curve(axis, x, y, name=title_of(score), **_style(score, results))
        if score == RANDOM:
            low, high = ([edge(v) for v in by_seed] for edge in (min, max))
            axis.fill_between(x, low, high, color="black", alpha=0.15, linewidth=0)
    axis.margins(x=0.02)


def _style(score: str, results: AblationResults) -> dict[str, Any]:
    """Return color and line of a score: as in the paper, a normalized one is dashed."""
    if score == RANDOM:
        return {"color": "black", "marker": "o"}
    bases = dict.fromkeys(map(_base, (s for s in results.scores if s != RANDOM)))
    color = PALETTE[list(bases).index(_base(score)) % (len(PALETTE) - 1)]
    if score.endswith("_ln"):
        return {"color": color, "marker": "^", "linestyle": "--"}
    if score.endswith("_hn"):
        return {"color": color, "marker": "*", "linestyle": ":"}
    return {"color": color, "marker": "o"}


def _base(score: str) -> str:
    return score.removesuffix("_ln").removesuffix("_hn")


def draw_ranks(results: AblationResults) -> Any:
    """Draw the rank of each score by AUC (Figure 3 of P3); None with fewer than two scores."""
    scores, names = results.scores, shown_on(results)
    if len(scores) < 2:
        return None
    rank = {(curve.on, curve.score): curve.rank for curve in results.curves}
    table = np.asarray([[rank[name, score] for score in scores] for name in names], dtype=float)
    height = 1.6 + 0.34 * len(names)
    figure, ((axis,),) = panels(1, 1, height, width=min(11.0, 3.0 + 0.75 * len(scores)))
    rows, columns = [short(name, 30) for name in names], [title_of(score) for score in scores]
    image = heatmap(axis, table, rows, columns, vmin=1, vmax=len(scores), cmap=f"{MAP}_r")
    for (row, column), value in np.ndenumerate(table):
        is_dark = image.norm(value) > 0.5
        axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=9,
                  color="white" if is_dark else "black")  # fmt: skip
    axis.set_xticks(range(len(scores)), columns, rotation=35, ha="right")
    axis.set_yticks(range(len(names)), rows)
    label(axis, "rank by normalized AUC, 1 the best")
    return figure


def draw_masks(results: AblationResults, masks: Arrays) -> Any:
    """Draw how often each head was zeroed, [layer, head], by score and percentage asked for."""
    by_score = {
        title_of(score): {
            f"{point.asked:g}%": masks[point.label] for point in results.of(score) if point.asked
        }
        for score in results.scores
        if score != RANDOM
    }
    return shares_of_heads({title: of for title, of in by_score.items() if of})


def draw_given(results: AblationResults) -> Any:
    """Draw the joint effect of the named heads and interventions; None without any."""
    rows = [
        (f"{short(point.label, 40)} on {short(name, 24)}", point.values[name])
        for point in results.points
        if point.row.startswith("--")
        for name in shown_on(results)
        if point.values[name].change is not None
    ]
    if not rows:
        return None
    figure, ((axis,),) = panels(1, 1, 1.4 + 0.35 * len(rows))
    change = [value.change for _, value in rows]
    error = [value.standard_error or 0.0 for _, value in rows]
    names = [name for name, _ in rows]
    bars(axis, change, names, upright=False, xerr=error, color=BLUE, ecolor=GRAY)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    label(axis, "zeroed or changed together", "", f"change of {results.quantity}")
    return figure


def draw_single_heads(results: AblationResults) -> Any:
    """Draw the effect of each head of a layer, zeroed alone (P4.7), with one standard error."""
    rows = [row for row in dict.fromkeys(p.row for p in results.points) if row.startswith("layer ")]
    if not rows:
        return None
    name = shown_on(results)[0]
    figure, ((axis,),) = panels(1, 1, 3.4)
    values = [point.values[name] for point in results.of(rows[0])]
    change = np.asarray([np.nan if v.change is None else v.change for v in values])
    error = np.asarray([0.0 if v.standard_error is None else v.standard_error for v in values])
    bars(axis, change, yerr=error, color=BLUE, ecolor=GRAY)
    axis.axhline(0, color="black", linewidth=0.8)
    label(axis, f"one head of {rows[0]} zeroed: {short(name, 40)}",
          f"change of {results.quantity}", "head")  # fmt: skip
    whole_numbers(axis.xaxis)
    return figure


def draw_tsne(tsne: Arrays) -> Any:
    """Draw the activations of layer 0's MLP, a panel for each head zeroed (Figure 5 of P4)."""
    if not tsne:
        return None
    position = tsne["position_N"]
    first = position == 0
    names = [name for name in tsne if name != "position_N"]
    figure, axes = even_panels(len(names), 5, 2.3)
    for axis, name in zip(axes, names, strict=True):
        rest, zero = tsne[name][~first], tsne[name][first]
        dots = axis.scatter(*rest.T, c=position[~first], cmap=MAP, s=9, alpha=0.85, linewidth=0)
        axis.scatter(*zero.T, s=36, marker="*", color=VERMILION, ec="black", lw=0.4)
        label(axis, name if name == UNCHANGED else f"{name} zeroed")
        axis.set_xticks([])
        axis.set_yticks([])
    bar = figure.colorbar(dots, ax=list(axes), label="token position (star: 0)")
    whole_numbers(bar.ax.yaxis)
    return figure


FIGURES: dict[str, tuple[str, str, Callable[[AblationResults, Arrays, Arrays], Any]]] = {
    "curves": (
        "Quality against heads zeroed",
        "Each point zeroes, in every sequence, the heads beyond a threshold (P3.12); across: the "
        "share that was zeroed (P3.13). Dashed, gray: the unchanged model; dotted: the tolerance "
        "(P3.15). Black: heads zeroed at random (P3.9), the mean and the range over seeds.",
        lambda results, *_: draw_curves(results),
    ),
    "ranks": (
        "Ranking of scores",
        "By the area under the curve, divided by its span of percentages (P3.16).",
        lambda results, *_: draw_ranks(results),
    ),
    "masks": (
        "Which heads are zeroed",
        "Share of the sequences in which a head was zeroed, layer by head, for each percentage "
        "that the threshold is set for (P3.11). A layer is scored after the layers below it were "
        "zeroed.",
        lambda results, masks, _: draw_masks(results, masks),
    ),
    "given": (
        "Effect of the named heads and interventions",
        "Change against the unchanged model on each dataset or task, and one standard error.",
        lambda results, *_: draw_given(results),
    ),
    "single_heads": (
        "One head at a time",
        "Change when one head of the layer is zeroed in every sequence (P4.7), and one standard "
        "error of it, over the texts.",
        lambda results, *_: draw_single_heads(results),
    ),
    "tsne": (
        "MLP activations of layer 0",
        "t-SNE of act(gate) up of the first tokens, unchanged and with one head of layer 0 "
        "zeroed at a time (P4.6, P4.7). Every panel is a separate projection: do not compare "
        "distances between panels.",
        lambda *given: draw_tsne(given[-1]),
    ),
}
"""Figure -> title, caption, and its drawing of results, masks and t-SNE; None without numbers."""


def draw_all(results: AblationResults, masks: Arrays, tsne: Arrays) -> list[Picture]:
    """Return the pictures for which there are results."""
    with styled():
        drawn = {name: draw(results, masks, tsne) for name, (_, _, draw) in FIGURES.items()}
        return [picture_of(fig, n, *FIGURES[n][:2]) for n, fig in drawn.items() if fig is not None]
