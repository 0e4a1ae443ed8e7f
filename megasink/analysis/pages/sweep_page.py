"""Write a sweep: sweep.json, sweep.csv, sweep.npz, and its page."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.sinks import EPSILONS
from megasink.analysis.pages import html
from megasink.analysis.pages.drawing import Drawing, drawing, pictures
from megasink.analysis.result_schemas import SweepResults, SweepRow, number_of
from megasink.attention.constants import SINK_EPSILON
from megasink.figures.recorded_panels import curve
from megasink.figures.style import MAP, even_panels, label, shares_of_heads

_AXES = {"length": "tokens of the text", "copies": "copies of the first token", "bos": "BOS"}
DRAWINGS: list[Drawing] = []


def write_sweep(results: SweepResults, arrays: dict[str, Any], output: Path) -> None:
    """Write a sweep and print its table; the arrays are "score/setting" -> [N, L, H]."""
    table = [_table_row(row, results.rows) for row in results.rows]
    names = ["length", "bos", "copies", "samples", "sink_rate", "inactive_awft"]
    names += ["inactive_ahon_ln", "massive_ratio", "nats_per_token"]
    printed = [names, *([_short(line[name]) for name in names] for line in table)]
    html.publish(
        output,
        "sweep",
        model=results.model.name,
        heading="lengths, BOS and first tokens",
        words=in_words(results),
        pictures=pictures(DRAWINGS, results),
        after={
            "Every setting": [_settings(results, table)],
            "How it was measured": [_provenance(results)],
        },
        files={"sweep.json": results, "sweep.csv": table, "sweep.npz": arrays},
        lines=[
            "  ".join(f"{cell:>{max(7, len(name))}}" for name, cell in zip(names, row, strict=True))
            for row in printed
        ],
    )
    for row in results.rows:
        if row.non_finite:
            print(
                f"megasink: warning: {len(row.non_finite)} samples of {_setting(row)} have "
                f"infinite or NaN values (first: {row.non_finite[0]}) and are left out of averages",
                file=sys.stderr,
            )


def in_words(results: SweepResults) -> list[str]:
    """Return the largest changes over the settings: of the sink rate and the loss."""
    lines, varied = [], _varied(results.rows)
    for name, what, form in (
        ("sink_rate", "heads with an attention sink on the first token", "{:.1%}"),
        ("nats_per_token", "loss on the text without its first token", "{:.3f} nats per token"),
    ):
        values = _numbers(results.rows, name)
        if np.isfinite(values).any():
            ends = [int(find(values)) for find in (np.nanargmin, np.nanargmax)]
            low, high = (form.format(values[i]) for i in ends)
            at, to = (_setting(results.rows[i], varied or _AXES) for i in ends)
            moves = (
                f"from {low} ({at}) to {high} ({to})" if low != high else f"{low} at any setting"
            )
            lines.append(f"{results.model.name}, {what}: {moves}.")
    return lines


def _settings(results: SweepResults, table: list[dict[str, Any]]) -> str:
    rows = [[_setting(row), *map(_short, list(line.values())[3:])]
            for row, line in zip(results.rows, table, strict=True)]  # fmt: skip
    entries = metrics()
    head = [entries[n].title if n in entries else n.replace("_", " ") for n in list(table[0])[3:]]
    return html.table(["", *head], rows)


def _provenance(results: SweepResults) -> str:
    facts: dict[str, object] = {
        "megasink": results.megasink,
        "data": ", ".join(results.data),
        "samples at most": results.max_samples,
        "replaced positions": results.replaced_positions,
        "thresholds set by": results.set_by,
    }
    for name, tau in results.thresholds.items():
        facts[f"threshold of {metrics()[name].title}"] = f"{tau:.4g}"
    return html.facts(results.model.name, facts)


def _table_row(row: SweepRow, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return one line of sweep.csv: the setting, and each number that any row has."""
    keys = ("length", "bos", "copies", "samples", "tokens")
    return {
        **{key: getattr(row, key) for key in keys},
        **{
            name: number_of(row, name)
            for name, entry in metrics().items()
            if entry.is_summarized and any(name in of.metrics for of in rows)
        },
        **{f"inactive_{name}": share for name, share in row.inactive.items()},
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@drawing(DRAWINGS, "sweep", "", "Sinks, heads and loss by setting")
def _sweep(results: SweepResults) -> Any:
    """The x axis is the first setting that varies: length, copies or BOS. Each combination of the
    others is a line. Sinks: the share of heads whose mean attention to the first token exceeds
    eps (P2.3, P4.3). Inactive heads: by fixed thresholds, set by the longest texts (P3.24). Massive
    activation: the norm of the first token over that of the others (P4.1).
    """
    from matplotlib import colormaps

    rows = results.rows
    over, *others = _varied(rows) or ["length"]
    lines: dict[str, list[SweepRow]] = {}
    for row in rows:
        lines.setdefault(_setting(row, others), []).append(row)
    figure, axes = even_panels(4, 2, 3.3)
    rates = EPSILONS if len(lines) == 1 else {SINK_EPSILON: EPSILONS[SINK_EPSILON]}
    for index, (name, line) in enumerate(lines.items()):
        color = colormaps[MAP](0.9 * index / max(1, len(lines) - 1))
        style: dict[str, Any] = {"color": color, "marker": "o"}
        at = [getattr(row, over) for row in line]
        for rank, (eps, rate) in enumerate(rates.items()):
            shade = colormaps["plasma"](0.8 * rank / len(rates)) if len(rates) > 1 else color
            values = 100 * _numbers(line, rate)
            text = f"eps {eps}" if len(rates) > 1 else name
            curve(axes[0], at, values, name=text, **style | {"color": shade})
        for score, dash in zip(rows[0].inactive, ("-", "--"), strict=True):
            values = [100 * row.inactive[score] for row in line]
            once = metrics()[score].title if index == 0 else ""
            curve(axes[1], at, values, name=once, **style, linestyle=dash)
        curve(axes[2], at, _numbers(line, "massive_ratio"), name=name, **style)
        curve(axes[3], at, _numbers(line, "nats_per_token"), name=name, **style)
    which = "" if len(rates) > 1 else f" (eps {SINK_EPSILON})"
    titles = (
        (f"sink on the first token{which}", "% of heads"),
        ("inactive heads (fixed thresholds)", "% of heads"),
        ("massive activation", "first token / mean of the others"),
        ("loss on the text without its first token", "nats per token"),
    )
    for axis, (title, text) in zip(axes, titles, strict=True):
        label(axis, title, text, _AXES[over])
        values = sorted({getattr(row, over) for row in rows})
        if over != "bos":
            if over == "length" and max(values) > 4 * min(values):
                axis.set_xscale("log", base=2)
            axis.set_xticks(values, [str(v) for v in values])
            axis.minorticks_off()
        else:
            axis.margins(x=0.3)
    ratios = _numbers(rows, "massive_ratio")
    if np.nanmax(ratios) > 10 * np.nanmin(ratios):
        axes[2].set_yscale("log")
    for axis in axes[:2]:
        axis.set_ylim(-3, 103)
        if axis.get_legend_handles_labels()[1] not in ([], [""]):
            axis.legend()
    return figure


def _varied(rows: Sequence[SweepRow]) -> list[str]:
    """Return the settings with several values."""
    return [key for key in _AXES if len({getattr(row, key) for row in rows}) > 1]


def _numbers(rows: Sequence[SweepRow], metric: str) -> Any:
    """Return the metric's number in each row; NaN if not measured."""
    return np.asarray([number_of(row, metric) for row in rows], dtype=np.float64)


@drawing(DRAWINGS, "masks", "", "Which heads are inactive")
def _masks(results: SweepResults) -> Any:
    """Share of the samples in which a head is inactive, layer by head, for each setting (P3.24).
    The threshold is the same for all.
    """
    rows = results.rows
    names = [_setting(row, _varied(rows) or _AXES).replace(", ", "\n") for row in rows]
    return shares_of_heads(
        {
            metrics()[score].title: {
                name: np.asarray(row.inactive_by_head[score], dtype=float)
                for name, row in zip(names, rows, strict=True)
            }
            for score in rows[0].inactive_by_head
        }
    )


def _setting(row: SweepRow, keys: Iterable[str] = _AXES) -> str:
    """Return the setting of a row in words, or a part of it."""
    words = {
        "length": f"{row.length} tokens",
        "copies": "1 copy" if row.copies == 1 else f"{row.copies} copies",
        "bos": "with BOS" if row.bos == "add" else "without BOS",
    }
    return ", ".join(words[key] for key in keys)
