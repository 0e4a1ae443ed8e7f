"""Figures of an ablation: curves, ranks, masks, and the heads of one layer.

Shapes: L layers, H heads.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.ablate.quality_curves import kept_level
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.drawing import Drawing, drawing
from megasink.analysis.result_schemas import ALL, RANDOM, UNCHANGED, AblationResults, mean_line
from megasink.figures import style
from megasink.figures.recorded_panels import bars, curve

Arrays = Mapping[str, NDArray[np.float64]]
"""Label of a point -> [L, H], the share of samples in which each head was zeroed (NaN: no head), or
[N, 2], the t-SNE coordinates."""

_X = "% of heads zeroed"
_SEVERAL = 8
"""Maximum number of curve panels on the page. The other datasets are in ablation.csv."""
DRAWINGS: list[Drawing] = []
"""Each drawing uses the results, the masks of points.npz, and tsne.npz."""


def title_of(score: str) -> str:
    """Return the name of a score in figures and tables."""
    return "random heads" if score == RANDOM else metrics()[score].title


def shown_on(results: AblationResults) -> list[str]:
    """Return the datasets or tasks, all texts together first."""
    names = list(results.unchanged.values)
    return sorted(names, key=lambda name: name != ALL)


@drawing(DRAWINGS, "curves", "", "Quality by percentage of zeroed heads")
def _curves(results: AblationResults, *_: Any) -> Any:
    """Each point zeroes, in every sequence, the heads beyond a threshold (P3.12); across: the share
    that was zeroed (P3.13). Dashed, gray: the unchanged model; dotted: the tolerance (P3.15).
    Black: heads zeroed at random (P3.9), the mean and the range over seeds.
    """
    if not results.scores:
        return None
    names = shown_on(results)[:_SEVERAL]
    drawn = [(name, "value", results.quantity) for name in names]
    if results.unchanged.values[names[0]].bits_per_byte is not None:
        drawn.append((names[0], "bits_per_byte", "bits per byte"))
    figure, axes = style.even_panels(len(drawn), 3 if len(drawn) > 4 else 2, 3.9)
    for axis, (name, what, unit) in zip(axes, drawn, strict=True):
        baseline = results.unchanged.number(name, what)
        axis.axhline(baseline, color=style.GRAY, linestyle="--", linewidth=1)
        for score in results.scores:
            line = results.line(score)
            x = mean_line(line, name)[0]
            by_seed = [[point.number(name, what) for point in points] for points in line.values()]
            y = [float(np.mean(values)) for values in by_seed]
            curve(axis, x, y, name=title_of(score), **_style(score, results))
            if score == RANDOM:
                low, high = ([edge(v) for v in by_seed] for edge in (min, max))
                axis.fill_between(x, low, high, color="black", alpha=0.15, linewidth=0)
        axis.margins(x=0.02)
        if what == "value":
            level = kept_level(baseline, higher_is_better=results.higher_is_better)
            axis.axhline(level, color=style.GRAY, linestyle=":", linewidth=1)
        style.label(axis, style.short(name, 48), unit, _X)
    style.legend(figure, axes[0])
    return figure


def _style(score: str, results: AblationResults) -> dict[str, Any]:
    """Return color and line of a score: as in the paper, a normalized one is dashed."""
    if score == RANDOM:
        return {"color": "black", "marker": "o"}
    bases = dict.fromkeys(map(_base, (s for s in results.scores if s != RANDOM)))
    color = style.PALETTE[list(bases).index(_base(score)) % (len(style.PALETTE) - 1)]
    if score.endswith("_ln"):
        return {"color": color, "marker": "^", "linestyle": "--"}
    if score.endswith("_hn"):
        return {"color": color, "marker": "*", "linestyle": ":"}
    return {"color": color, "marker": "o"}


def _base(score: str) -> str:
    return score.removesuffix("_ln").removesuffix("_hn")


@drawing(DRAWINGS, "ranks", "", "Ranking of scores")
def _ranks(results: AblationResults, *_: Any) -> Any:
    """By the area under the curve, divided by its span of percentages (P3.16)."""
    scores, names = results.scores, shown_on(results)
    if len(scores) < 2:
        return None
    rank = {(curve.on, curve.score): curve.rank for curve in results.curves}
    table = np.asarray([[rank[name, score] for score in scores] for name in names], dtype=float)
    height = 1.6 + 0.34 * len(names)
    figure, ((axis,),) = style.panels(1, 1, height, width=min(11.0, 3.0 + 0.75 * len(scores)))
    rows, columns = [style.short(name, 30) for name in names], [title_of(score) for score in scores]
    image = style.heatmap(
        axis, table, rows, columns, vmin=1, vmax=len(scores), cmap=f"{style.MAP}_r"
    )
    style.write_cells(axis, image, table, 9, "{:.0f}")
    axis.set_xticks(range(len(scores)), columns, rotation=35, ha="right")
    axis.set_yticks(range(len(names)), rows)
    style.label(axis, "rank by normalized AUC (1 is best)")
    return figure


@drawing(DRAWINGS, "masks", "", "Which heads are zeroed")
def _masks(results: AblationResults, masks: Arrays, _: Arrays) -> Any:
    """Share of the sequences in which a head was zeroed, layer by head, for each percentage that
    the threshold is set for (P3.11). A layer is scored after the layers below it were zeroed.
    """
    by_score = {
        title_of(score): {
            f"{point.asked:g}%": masks[point.label] for point in results.of(score) if point.asked
        }
        for score in results.scores
        if score != RANDOM
    }
    return style.shares_of_heads({title: of for title, of in by_score.items() if of})


@drawing(DRAWINGS, "given", "", "Effect of the named heads and interventions")
def _given(results: AblationResults, *_: Any) -> Any:
    """Change against the unchanged model on each dataset or task, and one standard error."""
    rows = [
        (f"{style.short(point.label, 40)} on {style.short(name, 24)}", point.values[name])
        for point in results.points
        if point.row.startswith("--")
        for name in shown_on(results)
        if point.values[name].change is not None
    ]
    if not rows:
        return None
    figure, ((axis,),) = style.panels(1, 1, 1.4 + 0.35 * len(rows))
    change = [value.change for _, value in rows]
    error = [value.standard_error or 0.0 for _, value in rows]
    names = [name for name, _ in rows]
    bars(axis, change, names, upright=False, xerr=error, color=style.BLUE, ecolor=style.GRAY)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    style.label(axis, "zeroed or changed together", "", f"change of {results.quantity}")
    return figure


@drawing(DRAWINGS, "single_heads", "", "One head at a time")
def _single_heads(results: AblationResults, *_: Any) -> Any:
    """Change when one head of the layer is zeroed in every sequence (P4.7), and one standard error
    of it, over the texts.
    """
    rows = [row for row in dict.fromkeys(p.row for p in results.points) if row.startswith("layer ")]
    if not rows:
        return None
    name = shown_on(results)[0]
    figure, ((axis,),) = style.panels(1, 1, 3.4)
    points = results.of(rows[0])
    change, error = (
        np.asarray([point.number(name, what) for point in points])
        for what in ("change", "standard_error")
    )
    bars(axis, change, yerr=np.nan_to_num(error), color=style.BLUE, ecolor=style.GRAY)
    axis.axhline(0, color="black", linewidth=0.8)
    title = f"one head of {rows[0]} zeroed: {style.short(name, 40)}"
    style.label(axis, title, f"change of {results.quantity}", "head")
    style.whole_numbers(axis.xaxis)
    return figure


@drawing(DRAWINGS, "tsne", "", "MLP activations of layer 0")
def _tsne(_: AblationResults, __: Arrays, tsne: Arrays) -> Any:
    """t-SNE of act(gate) up of the first tokens, unchanged and with one head of layer 0 zeroed at a
    time (P4.6, P4.7). Every panel is a separate projection: do not compare distances between
    panels.
    """
    if not tsne:
        return None
    names = [name for name in tsne if name != "position_N"]
    figure, axes = style.even_panels(len(names), 5, 2.3)
    for axis, name in zip(axes, names, strict=True):
        dots = style.by_position(axis, tsne[name], tsne["position_N"], 9, 36)
        style.label(axis, name if name == UNCHANGED else f"{name} zeroed")
        axis.set_xticks([])
        axis.set_yticks([])
    bar = figure.colorbar(dots, ax=list(axes), label="token position (star: 0)")
    style.whole_numbers(bar.ax.yaxis)
    return figure
