"""Write a sweep: sweep.json, sweep.csv, sweep.npz, and its figures."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.sinks import EPSILONS
from megasink.analysis.pages.csv_file import write_csv
from megasink.analysis.pages.style import MAP, heatmap, label, panels, save, styled
from megasink.analysis.results import SweepResults, SweepRow
from megasink.analysis.results_files import write_arrays, write_json, writing
from megasink.attention.definitions import SINK_EPSILON

_AXES = {"length": "tokens of the text", "copies": "copies of the first token", "bos": "BOS"}


def write_sweep(results: SweepResults, arrays: dict[str, Any], output: Path) -> None:
    """Write a sweep and print its table.

    Args:
        results: contents of sweep.json.
        arrays: contents of sweep.npz: "score/setting" -> [samples, layers, heads].

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    table = [table_row(row, results.rows) for row in results.rows]
    with writing(output):
        write_arrays(output / "sweep.npz", arrays)
        write_csv(output / "sweep.csv", list(table[0]), table)
        draw_sweep(results, output / "sweep.png")
        draw_masks(results, output / "sweep_masks.png")
        write_json(output / "sweep.json", results)
    shown = [
        *("length", "bos", "copies", "samples", "sink_rate", "inactive_awft"),
        *("inactive_ahon_ln", "massive_ratio", "nats_per_token"),
    ]
    print("  ".join(f"{name:>{max(7, len(name))}}" for name in shown))
    for line in table:
        cells = [_short(line[name]) for name in shown]
        print("  ".join(f"{c:>{max(7, len(n))}}" for n, c in zip(shown, cells, strict=True)))
    for row in results.rows:
        if row.non_finite:
            print(
                f"megasink: warning: {len(row.non_finite)} samples of {_setting(row)} have "
                f"infinite or NaN values, {row.non_finite[0]} first: left out of every average",
                file=sys.stderr,
            )
    print(f"wrote {output}/sweep.json and its schema, sweep.csv, sweep.npz, sweep*.png")


def table_row(row: SweepRow, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return one line of sweep.csv: the setting, and each number that any row has."""
    keys = ("length", "bos", "copies", "samples", "tokens")
    return {
        **{key: getattr(row, key) for key in keys},
        **{
            name: row.metrics[name].number if name in row.metrics else None
            for name, entry in metrics().items()
            if entry.is_summarized and any(name in of.metrics for of in rows)
        },
        **{f"inactive_{name}": share for name, share in row.inactive.items()},
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@styled()
def draw_sweep(results: SweepResults, output: Path) -> None:
    """Draw sink rate, inactive heads, massive activation and loss over the swept variable.

    The x axis is the first of length, copies and BOS with several values; the others are lines.
    """
    from matplotlib import colormaps

    rows = results.rows
    over = next((key for key in _AXES if len({getattr(r, key) for r in rows}) > 1), "length")
    others = [k for k in _AXES if k != over and len({getattr(row, k) for row in rows}) > 1]
    lines: dict[str, list[SweepRow]] = {}
    for row in rows:
        lines.setdefault(_setting(row, others), []).append(row)
    figure, (axes,) = panels(1, 4, 3.8, width=18)
    rates = EPSILONS if len(lines) == 1 else {SINK_EPSILON: EPSILONS[SINK_EPSILON]}
    for index, (name, line) in enumerate(lines.items()):
        color = colormaps[MAP](0.9 * index / max(1, len(lines) - 1))
        style = {"color": color, "marker": "o"}
        at = [getattr(row, over) for row in line]
        for rank, (eps, rate) in enumerate(rates.items()):
            shade = colormaps["plasma"](0.8 * rank / len(rates)) if len(rates) > 1 else color
            values = 100 * _numbers(line, rate)
            text = f"eps {eps}" if len(rates) > 1 else name
            axes[0].plot(at, values, **style | {"color": shade}, label=text)
        for score, dash in zip(rows[0].inactive, ("-", "--"), strict=True):
            values = [100 * row.inactive[score] for row in line]
            # matplotlib omits such labels from legends.
            once = metrics()[score].title if index == 0 else "_"
            axes[1].plot(at, values, **style, linestyle=dash, label=once)
        axes[2].plot(at, _numbers(line, "massive_ratio"), **style, label=name)
        axes[3].plot(at, _numbers(line, "nats_per_token"), **style, label=name)
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
    save(figure, output)


def _numbers(rows: Sequence[SweepRow], metric: str) -> Any:
    """Return the metric's number in each row; NaN if not measured."""
    numbers = (row.metrics[metric].number if metric in row.metrics else None for row in rows)
    return np.asarray(list(numbers), dtype=np.float64)


@styled()
def draw_masks(results: SweepResults, output: Path) -> None:
    """Draw how often each head is inactive, [layer, head], per setting (P3.24)."""
    rows, scores = results.rows, list(results.rows[0].inactive_by_head)
    width, height = 2.0 + 1.3 * len(rows), 2.4 * len(scores) + 0.6
    figure, axes = panels(len(scores), 1, height, width=width, sharex=True)
    for axis, score in zip(axes[:, 0], scores, strict=True):
        tables = [np.asarray(row.inactive_by_head[score], dtype=float) for row in rows]
        layers, heads = tables[0].shape
        # One picture side by side, with a blank column between settings.
        gap = np.full((layers, 1), np.nan)
        together = np.concatenate([part for table in tables for part in (table, gap)][:-1], 1)
        image = heatmap(axis, together, vmin=0, vmax=1, cmap="magma")
        label(axis, metrics()[score].title, "layer")
        names = [_setting(row).replace(", ", "\n") for row in rows]
        axis.set_xticks(np.arange(len(rows)) * (heads + 1) + (heads - 1) / 2, names, fontsize=8)
        axis.tick_params(axis="x", length=0)
    figure.supxlabel("heads, by setting", fontsize=10)
    figure.colorbar(image, ax=axes[:, 0], label="share of samples")
    save(figure, output)


def _setting(row: SweepRow, keys: Iterable[str] = _AXES) -> str:
    """Return the setting of a row in words, or a part of it."""
    words = {
        "length": f"{row.length} tokens",
        "copies": "1 copy" if row.copies == 1 else f"{row.copies} copies",
        "bos": "with BOS" if row.bos == "add" else "without BOS",
    }
    return ", ".join(words[key] for key in keys)
