"""Figures of heads: importance, scores of inactive heads, explicit gates."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megasink.analysis.analysis_object import INACTIVE_SHARE, Analysis, array
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.drawing import Drawing, drawing
from megasink.figures import style
from megasink.figures.recorded_panels import curve, ecdf

SIX = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")
_BINS = 50
DRAWINGS: list[Drawing] = []


@drawing(DRAWINGS, "datasets", "Heads", "Head load by dataset")
def _datasets(analyses: Sequence[Analysis]) -> Any:
    """Head importance of the layer with the highest imbalance, by dataset (P0.22), and the
    distribution of AWFT over all heads, each head's mean over the samples (P3.23).
    """
    from matplotlib import colormaps

    analyses = [analysis for analysis in analyses if len(analysis.results.datasets) > 1]
    if not analyses:
        return None
    figure, axes = style.panels(len(analyses), 2, 2.9 * len(analyses))
    names = list(dict.fromkeys(n for a in analyses for n in a.results.datasets))
    colors = dict(zip(names, colormaps[style.MAP](np.linspace(0, 0.85, len(names))), strict=True))
    marks = dict(zip(names, "osD^vP*XdhH<>" * len(names), strict=False))
    for (left, right), analysis in zip(axes, analyses, strict=True):
        layer = int(np.nanargmax(analysis.values("imbalance")))
        for name in analysis.results.datasets:
            importance = analysis.values("importance", name)[layer]
            options = {"color": colors[name], "marker": marks[name], "ms": 4}
            curve(left, range(len(importance)), importance, "-", name, linewidth=0.9, **options)
            awft = analysis.values("awft", name)
            ecdf(right, awft[np.isfinite(awft)], name, color=colors[name])
        style.label(
            left, f"{style.wrapped(analysis.name)}: layer {layer}", "head importance", "head"
        )
        style.label(right, "AWFT of all heads, CDF", "share of heads", "AWFT, mean over samples")
        left.set_ylim(top=1.02)
        right.set_ylim(0, 1.02)
        style.whole_numbers(left.xaxis)
    style.legend(figure, axes[0, 0])
    return figure


def _thresholds(analyses: Sequence[Analysis]) -> str:
    return "; ".join(
        f"{analysis.name}: 15% of the heads are inactive {metrics()[name].inactive} "
        f"{taus[INACTIVE_SHARE]:.3g} by {metrics()[name].title}"
        for analysis in analyses
        for name, taus in analysis.results.inactive_heads.thresholds.items()
        if name in ("awft", "ahon_ln")
    )


@drawing(DRAWINGS, "scores", "Heads", "Inactive-head scores", finding=_thresholds)
def _scores(analyses: Sequence[Analysis]) -> Any:
    """Density and CDF of the 13 scores over samples, layers and heads (P3.1 to P3.8, P3.22); the
    highest 0.5% are cut off. Dotted: the threshold that marks 15% of the heads inactive, those
    above it for AWFT and below it for the others (P3.11).
    """
    margins = {"left": 0.05, "right": 0.99, "top": 0.955, "bottom": 0.02}
    spaces = {"wspace": 0.28, "hspace": 0.55}
    figure, axes = style.panels(7, 4, 13.5, layout=None, gridspec_kw=margins | spaces)
    pairs = [(name, f"{name}_ln") for name in SIX] + [("lthon_hn", "")]
    for row, pair in zip(axes, pairs, strict=True):
        for (left, right), name in zip((row[:2], row[2:]), pair, strict=True):
            if name:
                _distribution(left, right, name, analyses)
            else:
                left.remove()
                right.remove()
    style.model_legend(figure, axes[0, 0], analyses)
    return figure


def _distribution(left: Any, right: Any, name: str, analyses: Sequence[Analysis]) -> None:
    pools = [analysis.by_sample[name] for analysis in analyses]
    pools = [pool[np.isfinite(pool)] for pool in pools]
    low = min(float(np.quantile(pool, 0.001)) for pool in pools)
    high = max(float(np.quantile(pool, 0.995)) for pool in pools)
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    for (analysis, color, model), pool in zip(style.named(analyses), pools, strict=True):
        counts, _ = np.histogram(pool, edges)
        style.density(left, counts / len(pool) / np.diff(edges), edges, color, model)
        ecdf(right, pool, model, color=color)
        threshold = analysis.results.inactive_heads.thresholds[name][INACTIVE_SHARE]
        right.axvline(threshold, color=color, linestyle=":", linewidth=1.1)
    for axis in (left, right):
        axis.set_xlim(edges[0], edges[-1])
    title = metrics()[name].title
    style.label(left, title, "density")
    style.label(right, f"{title}, CDF", "share of heads")
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1)


@drawing(DRAWINGS, "inactive_by_layer", "Heads", "Inactive heads by layer")
def _inactive_by_layer(analyses: Sequence[Analysis]) -> Any:
    """Share of the layer's heads that AWFT and AHON (LN) mark inactive, at thresholds that mark 15%
    of all heads (dotted; P3.20).
    """
    figure, axes = style.panels(1, 2, 3.2, sharey=True)
    for axis, score in zip(axes[0], ("awft", "ahon_ln"), strict=True):
        for analysis, color, name in style.named(analyses):
            share = 100 * array(analysis.results.inactive_heads.share_by_layer[score])
            style.line(axis, np.arange(len(share)), share, color=color, name=name)
        style.label(
            axis, f"inactive by {metrics()[score].title}", "% of the layer's heads", "layer"
        )
        axis.set_ylim(-2, 102)
        axis.axhline(15, color="0.4", linewidth=0.8, linestyle=":")
        style.whole_numbers(axis.xaxis)
    style.model_legend(figure, axes[0, 0], analyses)
    return figure


@drawing(DRAWINGS, "agreement", "Heads", "Agreement between scores", by_model=True)
def _agreement(analysis: Analysis) -> Any:
    """Among the 10% most inactive heads by each score: |a and b| / |a or b| (P3.18), and precision
    |row and column| / |row| with the column as the truth (P3.19).
    """
    agreement = analysis.results.inactive_heads.agreement
    names = [metrics()[name].title for name in agreement.scores]
    margins = {"left": 0.11, "right": 0.935, "top": 0.95, "bottom": 0.22, "wspace": 0.36}
    figure, axes = style.panels(1, 2, 5.9, layout=None, gridspec_kw=margins)
    for axis, shares in zip(axes[0], (agreement.iou, agreement.precision), strict=True):
        table = array(shares)
        image = style.heatmap(axis, table, names, names, vmin=0, vmax=1, cmap=style.MAP)
        style.write_cells(axis, image, table, 5.2)
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
    style.label(axes[0, 0], "IoU", "score", "score")
    style.label(axes[0, 1], "precision", "predicting score", "reference score")
    bar = figure.add_axes((0.952, 0.3, 0.012, 0.57))
    figure.colorbar(image, cax=bar)
    return figure


@drawing(DRAWINGS, "gates", "Heads", "Explicit gate scores")
def _gates(analyses: Sequence[Analysis]) -> Any:
    """Density over [0, 1] of the gate scores of all heads and tokens, 100 bins (P1.29); by layer
    their mean, one standard deviation (band), and minimum and maximum (dotted; P1.30).
    """
    gated = [entry for entry in style.named(analyses) if entry[0].results.gate_histogram]
    if not gated:
        return None
    figure, axes = style.panels(1, 2, 3.4)
    for analysis, color, name in gated:
        counts = array(analysis.results.gate_histogram).sum(0)
        edges = np.linspace(0, 1, len(counts) + 1)
        style.density(axes[0, 0], counts / counts.sum() * len(counts), edges, color, name)
        mean = np.ma.masked_invalid(analysis.values("gate_score")).mean(1).filled(np.nan)
        std, low, high = map(analysis.values, ("gate_spread", "gate_min", "gate_max"))
        there = np.isfinite(mean)
        layers = np.arange(len(mean))
        style.line(axes[0, 1], layers, mean, color=color, name=name)
        band = [np.clip(mean + sign * std, 0, 1)[there] for sign in (-1, 1)]
        axes[0, 1].fill_between(layers[there], *band, color=color, alpha=0.18, linewidth=0)
        for edge, what in ((low, "minimum"), (high, "maximum")):
            of = f"{name}, {what}"
            curve(axes[0, 1], layers[there], edge[there], ":", of, color=color, linewidth=1)
    style.label(axes[0, 0], "all gate scores", "density", "gate score")
    style.label(axes[0, 1], "by layer", "gate score", "layer")
    axes[0, 0].set_xlim(0, 1)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 1].set_ylim(-0.03, 1.03)
    style.whole_numbers(axes[0, 1].xaxis)
    style.model_legend(figure, axes[0, 0], analyses)
    return figure
