"""A sweep on disk: sweep.json, sweep.csv, sweep.npz, and its figure."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megasink.atomic import atomic_file, atomic_text
from megasink.errors import UserError
from megasink.report.csv_file import write_csv
from megasink.report.style import MAP, heatmap, label, panels, save, styled

EPSILON = "0.3"

_AXES = {"length": "tokens of the text", "copies": "copies of the first token", "bos": "BOS"}


def write_sweep(found: dict[str, Any], arrays: dict[str, Any], output: Path) -> None:
    """Write a sweep, and print its table.

    Args:
        found: the content of sweep.json.
        arrays: of sweep.npz: "score/setting" -> [samples, layers, heads].

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    table = [table_row(row) for row in found["rows"]]
    try:
        output.mkdir(parents=True, exist_ok=True)
        with atomic_file(output / "sweep.npz") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        write_csv(output / "sweep.csv", list(table[0]), table)
        draw_sweep(found, output / "sweep.png")
        draw_masks(found, output / "sweep_masks.png")
        atomic_text(output / "sweep.json", json.dumps(found, indent=1))
    except OSError as error:
        raise UserError(
            f"the sweep cannot be written to {output} ({error.strerror or error}): make room, and "
            "the same command writes it without measuring anything again"
        ) from error
    shown = [
        *("length", "bos", "copies", "samples", f"sink_rate_{EPSILON}", "inactive_awft"),
        *("inactive_ahon_ln", "massive_ratio", "nats_per_token"),
    ]
    print("  ".join(f"{name:>{max(7, len(name))}}" for name in shown))
    for line in table:
        cells = [_short(line[name]) for name in shown]
        print("  ".join(f"{c:>{max(7, len(n))}}" for n, c in zip(shown, cells, strict=True)))
    for row in found["rows"]:
        if row["non_finite"]:
            setting = ", ".join(_name(key, row[key]) for key in _AXES)
            print(
                f"megasink: warning: {len(row['non_finite'])} samples of {setting} have infinite "
                f"or NaN values, {row['non_finite'][0]} first: left out of every average",
                file=sys.stderr,
            )
    print(f"wrote {output}/sweep.csv, sweep.json, sweep.npz, sweep.png, sweep_masks.png")


def table_row(row: dict[str, Any]) -> dict[str, Any]:
    """One line of sweep.csv."""
    keys = ("length", "bos", "copies", "samples", "tokens")
    return {
        **{key: row[key] for key in keys},
        **{f"sink_rate_{eps}": rates[0] for eps, rates in row["sink_rate"].items()},
        "first_token_attention": row["first_token_attention"],
        "imbalance": row["imbalance"],
        **{f"inactive_{name}": share for name, share in row["inactive"].items()},
        "massive_ratio": row["largest_massive_ratio"],
        "prominent_after_block": row["prominent_after_block"],
        "stage": row["stage"],
        "nats_per_token": row["nats_per_token"],
        "perplexity": row["perplexity"],
    }


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@styled()
def draw_sweep(found: dict[str, Any], output: Path) -> None:
    """Sink rate, inactive heads, massive activation and loss over what was swept.

    The first of length, copies and BOS with several values is the axis; the others are lines.
    """
    from matplotlib import colormaps

    rows = found["rows"]
    over = next((key for key in _AXES if len({row[key] for row in rows}) > 1), "length")
    others = [key for key in _AXES if key != over and len({row[key] for row in rows}) > 1]
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(", ".join(_name(key, row[key]) for key in others), []).append(row)
    figure, (axes,) = panels(1, 4, 3.8, width=18)
    rates = list(rows[0]["sink_rate"]) if len(lines) == 1 else [EPSILON]
    for index, (name, line) in enumerate(lines.items()):
        colour = colormaps[MAP](0.9 * index / max(1, len(lines) - 1))
        style = {"color": colour, "marker": "o"}
        at = [row[over] for row in line]
        for rank, eps in enumerate(rates):
            shade = colormaps["plasma"](0.8 * rank / len(rates)) if len(rates) > 1 else colour
            values = [100 * row["sink_rate"][eps][0] for row in line]
            text = f"eps {eps}" if len(rates) > 1 else name
            axes[0].plot(at, values, **style | {"color": shade}, label=text)
        for score, dash in zip(rows[0]["inactive"], ("-", "--"), strict=True):
            values = [100 * row["inactive"][score] for row in line]
            once = score if index == 0 else "_"  # matplotlib leaves those out of a legend
            axes[1].plot(at, values, **style, linestyle=dash, label=once)
        axes[2].plot(at, [row["largest_massive_ratio"] for row in line], **style, label=name)
        axes[3].plot(at, [row["nats_per_token"] for row in line], **style, label=name)
    titles = (
        ("sink on the first token" + ("" if len(rates) > 1 else f" (eps {EPSILON})"), "% of heads"),
        ("inactive heads, thresholds fixed", "% of heads"),
        ("massive activation", "first token / mean of the others"),
        ("loss on all of the text but its first token", "nats per token"),
    )
    for axis, (title, text) in zip(axes, titles, strict=True):
        label(axis, title, text, _AXES[over])
        values = sorted({row[over] for row in rows})
        if over != "bos":
            if over == "length" and max(values) > 4 * min(values):
                axis.set_xscale("log", base=2)
            axis.set_xticks(values, [str(v) for v in values])
            axis.minorticks_off()
        else:
            axis.margins(x=0.3)
    for axis in axes[:2]:
        axis.set_ylim(-3, 103)
    ratios = [row["largest_massive_ratio"] for row in rows]
    if max(ratios) > 10 * min(ratios):
        axes[2].set_yscale("log")
    for axis in (axes[0], axes[1]):
        if axis.get_legend_handles_labels()[1] not in ([], [""]):
            axis.legend()
    save(figure, output)


@styled()
def draw_masks(found: dict[str, Any], output: Path) -> None:
    """How often each head is inactive, [layer, head], setting by setting (P3.24)."""
    rows, scores = found["rows"], list(found["rows"][0]["inactive_by_head"])
    width, height = 2.0 + 1.3 * len(rows), 2.4 * len(scores) + 0.6
    figure, axes = panels(len(scores), 1, height, width=width, sharex=True)
    for axis, score in zip(axes[:, 0], scores, strict=True):
        tables = [np.asarray(row["inactive_by_head"][score], dtype=float) for row in rows]
        layers, heads = tables[0].shape
        # Side by side in one picture, a blank column between two settings.
        gap = np.full((layers, 1), np.nan)
        together = np.concatenate([part for table in tables for part in (table, gap)][:-1], 1)
        image = heatmap(axis, together, vmin=0, vmax=1, cmap="magma")
        label(axis, score, "layer")
        names = ["\n".join(_name(key, row[key]) for key in _AXES) for row in rows]
        axis.set_xticks(np.arange(len(rows)) * (heads + 1) + (heads - 1) / 2, names, fontsize=8)
        axis.tick_params(axis="x", length=0)
    figure.supxlabel("heads, setting by setting", fontsize=10)
    figure.colorbar(image, ax=axes[:, 0], label="share of samples")
    save(figure, output)


def _name(key: str, value: Any) -> str:
    if key == "bos":
        return "with BOS" if value == "add" else "without BOS"
    if key == "length":
        return f"{value} tokens"
    return "1 copy" if value == 1 else f"{value} copies"
