"""The figures of an analysis; several models over each other or side by side."""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from megasink.report.analysis import Analysis
from megasink.report.curves import GREY, style_axis

SCORES = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")
POSITIONS = (0, 1, 2, 4, 8, 16, 32)


def figures(analyses: Sequence[Analysis]) -> dict[str, bytes]:
    """name -> PNG of every figure that the analyses have numbers for."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawings: dict[str, Callable[[Any, Sequence[Analysis]], Any]] = {
        "importance": _importance,
        "sinks": _sinks,
        "norms": _norms,
        "values": _values,
        "scores": _scores,
        "inactive_by_layer": _inactive_by_layer,
        "agreement": _agreement,
    }
    if any("gate_histogram" in analysis.found for analysis in analyses):
        drawings["gates"] = _gates
    pictures = {}
    for name, draw in drawings.items():
        figure = draw(plt, analyses)
        stream = BytesIO()
        figure.savefig(stream, dpi=130, format="png")
        plt.close(figure)
        pictures[name] = stream.getvalue()
    return pictures


def _importance(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """[layer, head] heatmap of the mean gate (P0.12)."""
    count = len(analyses)
    figure, axes = plt.subplots(
        1, count, figsize=(4.6 * count + 0.8, 4.2), layout="constrained", squeeze=False
    )
    for axis, analysis in zip(axes[0], analyses, strict=True):
        importance = analysis.array("importance")
        image = axis.imshow(importance, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        imbalance = analysis.found["imbalance"]
        axis.set_title(f"{analysis.name}\nhead imbalance {imbalance:.3f}", fontsize=10, loc="left")
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
        _integer_ticks(axis)
    figure.colorbar(image, ax=axes[0, -1], label="head importance (mean gate)")
    return figure


def _integer_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))


def _sinks(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """Attention to the first token and sink rate by layer, sink rate by position (P1.31, P2.2)."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    colours = plt.get_cmap("tab10")
    for index, analysis in enumerate(analyses):
        style = {"color": colours(index % 10), "label": analysis.name}
        axes[0].plot(analysis.array("first_token_attention_by_layer"), "o-", ms=3, **style)
        axes[1].plot(100 * analysis.array("sink_rate_by_layer"), "o-", ms=3, **style)
        axes[2].plot(100 * analysis.array("sink_rate", "0.3"), "o-", ms=4, **style)
    style_axis(axes[0], "weight on the first token", "mean over heads and queries", "layer")
    style_axis(axes[1], "sink rate of the first token (eps 0.3)", "% of heads", "layer")
    style_axis(axes[2], "sink rate by position of the key (eps 0.3)", "% of heads", "key position")
    for axis, top in zip(axes, (1, 100, 100), strict=True):
        axis.set_ylim(-0.03 * top, 1.03 * top)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _norms(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """Norm of the states by position, and massive ratio (P4.1, P2.10)."""
    count = len(analyses)
    figure, axes = plt.subplots(
        1, count + 1, figsize=(4.8 * (count + 1), 3.8), layout="constrained", squeeze=False
    )
    colours = plt.get_cmap("plasma")
    for axis, analysis in zip(axes[0], analyses, strict=False):
        norm = analysis.array("curves", "state_norm")
        state = np.arange(len(norm)) / 2
        shown = [p for p in POSITIONS if p < norm.shape[1] and np.isfinite(norm[:, p]).any()]
        for rank, position in enumerate(shown):
            there = np.isfinite(norm[:, position])
            axis.plot(
                state[there],
                norm[there, position],
                color=colours(rank / max(1, len(POSITIONS))),
                label=f"position {position}",
            )
        axis.set_yscale("log")
        style_axis(
            axis, analysis.name, "L2 norm of the hidden state", "state (half: after attention)"
        )
        axis.legend(frameon=False, fontsize=7, ncol=2)
    for index, analysis in enumerate(analyses):
        ratio = analysis.array("massive_ratio")
        there = np.isfinite(ratio)
        axes[0, -1].plot(
            (np.arange(len(ratio)) / 2)[there],
            ratio[there],
            color=plt.get_cmap("tab10")(index % 10),
            label=analysis.name,
        )
    axes[0, -1].set_yscale("log")
    axes[0, -1].axhline(1, color=GREY, linewidth=0.8)
    style_axis(axes[0, -1], "massive activation", "first token / mean of the others", "state")
    axes[0, -1].legend(frameon=False, fontsize=9)
    return figure


def _values(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """Norms of values and keys, and the angle of queries to the first key, by position (P0.5)."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    colours = plt.get_cmap("tab10")
    for index, analysis in enumerate(analyses):
        style = {"color": colours(index % 10), "label": analysis.name}
        for axis, name in zip(axes, ("value_norm", "key_norm", "first_key_cosine"), strict=True):
            axis.plot(_mean_over_layers(analysis.array("curves", name)), **style)
        others = _mean_over_layers(analysis.array("curves", "other_key_cosine"))
        axes[2].plot(others, color=colours(index % 10), linestyle="--", label="other keys")
    style_axis(axes[0], "norm of the value", "L2 norm, mean over layers", "token")
    style_axis(axes[1], "norm of the key", "L2 norm, mean over layers", "token")
    style_axis(axes[2], "cosine of the query with the first key", "mean over layers", "token")
    for axis in axes[:2]:
        axis.set_ylim(bottom=0)
    axes[2].legend(frameon=False, fontsize=9)
    return figure


def _mean_over_layers(table: Any) -> Any:
    count = np.isfinite(table).sum(0)
    total = np.nansum(table, axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _scores(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """CDFs of P3's six scores over samples, layers and heads (P3.22)."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), layout="constrained")
    share = np.linspace(0, 1, 101)
    for axis, name in zip(axes.flat, SCORES, strict=True):
        for index, analysis in enumerate(analyses):
            quantiles = analysis.array("inactive_heads", "quantiles", name)
            colour = plt.get_cmap("tab10")(index % 10)
            axis.plot(quantiles, share, color=colour, label=analysis.name)
            axis.axvline(
                analysis.found["inactive_heads"]["thresholds"][name]["0.15"],
                color=colour,
                linestyle=":",
                linewidth=1,
            )
        style_axis(axis, name.upper(), "share of heads", "score (dotted: threshold of 15 %)")
    axes[0, 0].legend(frameon=False, fontsize=9)
    return figure


def _inactive_by_layer(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """Which layers the inactive heads are in, by two scores (P3.20)."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    width = 0.8 / len(analyses)
    for axis, name in zip(axes, ("awft", "ahon_ln"), strict=True):
        for index, analysis in enumerate(analyses):
            share = 100 * analysis.array("inactive_heads", "share_by_layer", name)
            axis.bar(
                np.arange(len(share)) + (index - (len(analyses) - 1) / 2) * width,
                np.nan_to_num(share),
                width,
                color=plt.get_cmap("tab10")(index % 10),
                label=analysis.name,
            )
        title = f"inactive by {name.upper().replace('_LN', ' (LN)')}, 15 % of all heads"
        style_axis(axis, title, "% of the layer's heads", "layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=9)
    return figure


def _agreement(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """IoU of the heads that two scores call inactive (P3.18)."""
    count = len(analyses)
    figure, axes = plt.subplots(
        1, count, figsize=(6.2 * count, 5.6), layout="constrained", squeeze=False
    )
    for axis, analysis in zip(axes[0], analyses, strict=True):
        names = analysis.found["inactive_heads"]["agreement"]["scores"]
        table = analysis.array("inactive_heads", "agreement", "iou")
        image = axis.imshow(table, vmin=0, vmax=1, cmap="magma")
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
        axis.set_title(f"{analysis.name}: IoU at 10 % of heads", fontsize=10, loc="left")
    figure.colorbar(image, ax=axes[0, -1])
    return figure


def _gates(plt: Any, analyses: Sequence[Analysis]) -> Any:
    """Density of explicit gate scores, and their mean by layer (P1.29, P1.30)."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for index, analysis in enumerate(analyses):
        if "gate_histogram" not in analysis.found:
            continue
        colour = plt.get_cmap("tab10")(index % 10)
        counts = analysis.array("gate_histogram").sum(0)
        bins = np.linspace(0, 1, len(counts) + 1)
        density = counts / counts.sum() * len(counts)
        axes[0].stairs(density, bins, color=colour, fill=True, alpha=0.5, label=analysis.name)
        gate = {key: analysis.array("gate", key) for key in ("gate_score", "gate_min", "gate_max")}
        layers = np.arange(len(gate["gate_score"]))
        axes[1].plot(layers, gate["gate_score"], "o-", ms=4, color=colour, label=analysis.name)
        there = np.isfinite(gate["gate_min"])
        axes[1].fill_between(
            layers[there],
            gate["gate_min"][there],
            gate["gate_max"][there],
            color=colour,
            alpha=0.15,
        )
    style_axis(axes[0], "scores of the explicit gate", "density", "score")
    style_axis(axes[1], "mean, least and largest score", "score", "layer")
    axes[1].set_xlim(-0.5, len(analyses[0].found["model"]["heads"]) - 0.5)
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, fontsize=9)
    return figure
