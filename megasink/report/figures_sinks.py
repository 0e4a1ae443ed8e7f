"""Figures of sinks and hidden states; several models over each other or side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megasink.report.analysis import Analysis, Floats
from megasink.report.drawing import Drawing
from megasink.report.style import (
    GREY,
    grid,
    label,
    line,
    log_scale,
    model_legend,
    named,
    panels,
    position_colours,
    share_limit,
    whole_numbers,
    wrapped,
)

POSITIONS = (0, 1, 2, 4, 8, 16, 32)


def _sinks(analyses: Sequence[Analysis]) -> Any:
    slots = any(np.nansum(a.array("slot_attention_by_layer")) > 0 for a in analyses)
    figure, axes = panels(1, 3 + slots, 3.2)
    first, rate, position = axes[0, 0], axes[0, 1], axes[0, -1]
    for analysis, colour, name in named(analyses):
        layers = np.arange(analysis.found["model"]["layers"])
        line(
            first,
            layers,
            analysis.array("first_token_attention_by_layer"),
            color=colour,
            label=name,
        )
        line(rate, layers, 100 * analysis.array("sink_rate_by_layer"), color=colour)
        rates = 100 * analysis.array("sink_rate", "0.3")
        line(position, np.arange(len(rates)), rates, color=colour)
        if slots:
            line(axes[0, 2], layers, analysis.array("slot_attention_by_layer"), color=colour)
    label(first, "weight on the first token", "mean weight", "layer")
    label(rate, "heads with a sink on token 0", "% of heads", "layer")
    label(position, "heads with a sink on token k", "% of heads", "k, position of the key")
    if slots:
        label(axes[0, 2], "weight on the sink or bias", "mean weight", "layer")
    share_limit(first, *axes[0, 2:-1])
    share_limit(rate, position, whole=100)
    for axis in axes[0]:
        whole_numbers(axis.xaxis)
    model_legend(figure, first, analyses)
    return figure


def _values(analyses: Sequence[Analysis]) -> Any:
    figure, axes = panels(1, 4, 3.2)
    names = ("value_norm", "key_norm", "query_norm", "first_key_cosine")
    for analysis, colour, name in named(analyses):
        for axis, key in zip(axes[0], names, strict=True):
            curve = _over_layers(analysis.array("curves", key))
            axis.plot(curve, color=colour, label=name)
        others = _over_layers(analysis.array("curves", "other_key_cosine"))
        axes[0, 3].plot(others, color=colour, linestyle="--")
    titles = ("values, norm(v_i)", "keys, norm(k_i)", "queries, norm(q_i)", "cos(q_i, k_0)")
    for axis, title in zip(axes[0], titles, strict=True):
        label(axis, title, "mean L2 norm", "i, position of the token")
        axis.set_ylim(0, 1.12 * max(float(np.nanmax(curve.get_ydata())) for curve in axis.lines))
        whole_numbers(axis.xaxis)
    axes[0, 3].set_ylim(-1.05, 1.05)
    axes[0, 3].set_ylabel("mean cosine")
    axes[0, 3].plot([], [], color=GREY, label="first key")
    axes[0, 3].plot([], [], color=GREY, linestyle="--", label="other keys")
    handles, labels = axes[0, 3].get_legend_handles_labels()
    axes[0, 3].legend(handles[-2:], labels[-2:], loc="best")
    model_legend(figure, axes[0, 0], analyses)
    return figure


def _over_layers(table: Floats) -> Floats:
    """Mean over layers of [L, P]; NaN only where no layer has a number."""
    count = np.isfinite(table).sum(0)
    total = np.nansum(table, axis=0)
    mean: Floats = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _norms(analyses: Sequence[Analysis]) -> Any:
    return _by_position(analyses, "state_norm", "mean L2 norm", is_log=True)


def _directions(analyses: Sequence[Analysis]) -> Any:
    if not any(np.isfinite(a.array("curves", "cosine_across_inputs")).any() for a in analyses):
        return None
    return _by_position(analyses, "cosine_across_inputs", "mean cosine", is_log=False)


def _by_position(analyses: Sequence[Analysis], key: str, ylabel: str, *, is_log: bool) -> Any:
    """States along x, one curve for each of some positions; one panel for each model."""
    rows, columns = grid(len(analyses), 3)
    figure, axes = panels(rows, columns, 3.1 * rows + 0.3, sharey=True)
    for axis, (analysis, _, _) in zip(axes.flat, named(analyses), strict=False):
        table = analysis.array("curves", key)
        state = np.arange(len(table)) / 2
        reached = [p for p in POSITIONS if p < table.shape[1] and np.isfinite(table[:, p]).any()]
        for position, colour in zip(reached, position_colours(len(reached)), strict=True):
            there = np.isfinite(table[:, position])
            x, y = state[there], table[there, position]
            first = position == 0
            axis.plot(
                x,
                y,
                color=colour,
                linewidth=2.2 if first else 1.2,
                zorder=3 if first else 2,
                label=f"token {position}",
            )
            if len(x) <= 81:
                whole = x == np.floor(x)
                size = 4 if len(x) <= 33 else 2.2
                axis.plot(x[whole], y[whole], "o", color=colour, ms=size, zorder=4)
                axis.plot(
                    x[~whole], y[~whole], "o", color=colour, mfc="white", mew=0.8, ms=size, zorder=4
                )
        label(axis, wrapped(analysis.name), ylabel, "layer (half: after attention)")
        whole_numbers(axis.xaxis)
    for axis in axes.flat[len(analyses) :]:
        axis.set_axis_off()
    if is_log:
        log_scale(*axes.flat[: len(analyses)])
    else:
        axes[0, 0].set_ylim(-0.25, 1.05)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(handles))
    return figure


def _activations(analyses: Sequence[Analysis]) -> Any:
    figure, axes = panels(1, 5, 3.2)
    for analysis, colour, name in named(analyses):
        states = analysis.array("state_abs_max")
        ratio = analysis.array("massive_ratio")
        layers = np.arange(analysis.found["model"]["layers"])
        curves = (
            analysis.array("attention_abs_max"),
            states[1::2],
            analysis.array("mlp_abs_max"),
            states[2::2],
        )
        for axis, curve in zip(axes[0, :4], curves, strict=True):
            line(axis, layers, curve, color=colour, label=name)
        line(axes[0, 4], layers, ratio[2::2], color=colour)
    titles = ("attention output", "state after attention", "MLP output", "state after MLP")
    for axis, title in zip(axes[0], titles, strict=False):
        label(axis, title, "", "layer")
    label(axes[0, 4], "norm of token 0 over others", "ratio of L2 norms", "layer")
    axes[0, 0].set_ylabel("largest absolute activation")
    for axis in axes[0]:
        whole_numbers(axis.xaxis)
    log_scale(*axes[0, :4])
    for axis in axes[0, 1:4]:
        axis.tick_params(labelleft=False)
    log_scale(axes[0, 4])
    axes[0, 4].axhline(1, color=GREY, linewidth=0.8, zorder=1)
    model_legend(figure, axes[0, 0], analyses)
    return figure


DRAWINGS = (
    Drawing(
        "sinks",
        "Sinks",
        "Attention sinks",
        "Weight on the first token by layer, mean over heads, queries and samples: "
        "F-Attn = mean A_i0 (P1.31). Share of heads whose mean weight on token k exceeds 0.3, "
        "alpha_k = 1/(T - k) sum over i >= k of A_ik > 0.3, for the first token by layer and for "
        "all layers by position of the key (P2.2). Weight on a learnable sink or bias, where the "
        "model has one (P2.27).",
        _sinks,
    ),
    Drawing(
        "values",
        "Sinks",
        "Values, keys and queries by token",
        "L2 norms of values, keys (after rotary embeddings) and queries by token, and the cosine "
        "of the query with the first key (solid) and its mean over the other keys (dashed); means "
        "over heads, layers and samples (P0.5, P2.8, P2.9).",
        _values,
    ),
    Drawing(
        "norms",
        "Hidden states",
        "Norm of the hidden state",
        "norm(x_i) by layer, mean over samples, for some token positions (P4.1, P2.8). x_0 is the "
        "embedding, x_(l + 1/2) the state after attention of block l (open circles), x_(l + 1) its "
        "output (filled circles).",
        _norms,
    ),
    Drawing(
        "directions",
        "Hidden states",
        "Direction of the hidden state across inputs",
        "Mean cosine between the states of different inputs at the same position, over pairs "
        "i != j (P4.5): 1 means that the state no longer depends on the input. Circles as above.",
        _directions,
    ),
    Drawing(
        "activations",
        "Hidden states",
        "Largest activations",
        "max abs of what attention and MLP return and of the states after them, by layer, the "
        "maximum of each sample and then the mean over samples (P1.32, P1.33); and the massive "
        "activation of block outputs, norm(x_0) / mean over i > 0 of norm(x_i) (P2.10).",
        _activations,
    ),
)
