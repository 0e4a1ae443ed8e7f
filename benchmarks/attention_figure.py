"""The picture of benchmarks/attention.py."""

from pathlib import Path
from typing import Any

from megasink.figures.style import DASHES, PALETTE

MARKERS = "osD^vP*"
CLOSE = 1.3  # ratios that the first panel has room for


def draw(report: dict[str, Any], path: Path) -> None:
    """Time over the floor, near it and all of it, and memory; one line per implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    rows = report["rows"]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6))
    close, all_of_them, memory = axes
    for index, name in enumerate(names):
        own = [row for row in rows if row["implementation"] == name]
        x, ratios = [row["length"] for row in own], [row["ratio"] for row in own]
        floor = name == report["floor"]
        color = "black" if floor else PALETTE[index % (len(PALETTE) - 1)]
        dashes = DASHES[index % len(DASHES)]
        style = {"color": color, "marker": MARKERS[index % len(MARKERS)], "ms": 4, "ls": dashes}
        low, high = zip(*(row["ratio_quartiles"] for row in own), strict=True)
        for axis in (close, all_of_them):
            axis.plot(x, ratios, label=name, **style)
            axis.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
        memory.plot(x, [row["peak_mib"] for row in own], **style)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_xlabel("sequence length S")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    close.set_ylim(0.9, CLOSE)
    close.set_title("time over the plain kernel, close to it")
    close.set_ylabel("ratio of forward + backward (median, quartiles)")
    _log_scale(all_of_them, [row["ratio"] for row in rows], "{:g}x")
    all_of_them.set_title("time over the plain kernel, all")
    _log_scale(memory, [row["peak_mib"] for row in rows], "{:g}")
    memory.set_title("peak memory, MiB")
    for axis in (all_of_them, memory):
        axis.yaxis.set_minor_locator(NullLocator())
    facts = report["facts"]
    plain = ("device", "shape", "dtype")
    caption = ", ".join(str(v) if k in plain else f"{k} {v}" for k, v in facts.items())
    figure.legend(*close.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
    figure.text(0.5, 0.002, caption, ha="center", va="bottom", fontsize=7.5, color="0.35")
    rows_of_legend = -(-len(names) // 4)
    figure.tight_layout(rect=(0, 0.04 + 0.055 * rows_of_legend, 1, 1))
    figure.legends[0].set_bbox_to_anchor((0.5, 0.035))
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _log_scale(axis: Any, values: list[float], form: str) -> None:
    """A log scale with ticks at powers of two, which few values apart still show."""
    axis.set_yscale("log")
    ticks = [
        2.0**power for power in range(-2, 40) if min(values) / 2 < 2.0**power < max(values) * 2
    ]
    axis.set_yticks(ticks, [form.format(tick) for tick in ticks])
