"""The pictures of balance.py and surgery.py."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models.training import NUMBERS, by_seed, importance_of, read_lines, surgery
from megasink.figures.style import (
    BLUE,
    GRAY,
    GREEN,
    VERMILION,
    WIDTH,
    rendered,
    styled,
)
from megasink.files.atomic import atomic_file

LABELS = {"none": "no loss", "eq7": "Eq. 7", "eq8-m1": "Eq. 8, m 1", "eq8-m3": "Eq. 8, m 3"}
COLORS = dict(zip(LABELS, (GRAY, BLUE, GREEN, VERMILION), strict=True))
VARIANTS = {"vanilla": GRAY, "sink": BLUE, "gated": VERMILION}


def draw_balance(results: Path, path: Path) -> None:
    """Write the heads before and after each arm, by rank in their layer, and the arms' numbers.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    before, found = by_seed(results)
    lines = read_lines(results)[1]
    with styled(), atomic_file(path) as file:
        figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
        maps, numbers = figure.subfigures(2, 1, height_ratios=(1.15, 1))
        shown = {"before": [before]} | {
            arm: [line for line in lines if line["arm"] == arm] for arm in LABELS
        }
        rows = maps.subplots(1, len(shown), sharey=True)
        # Heads of a layer in the order of their importance before: a pinned layer is one color.
        order = np.argsort(-importance_of(before), 1)
        for axes, (arm, runs) in zip(rows, shown.items(), strict=True):
            mean_LH = np.mean([importance_of(run) for run in runs], 0)
            sorted_LH = np.take_along_axis(mean_LH, order, 1)
            picture = axes.imshow(sorted_LH, vmin=0, vmax=1, aspect="auto", cmap="viridis")
            axes.set_title("before" if arm == "before" else LABELS[arm])
            axes.set_xlabel("rank before")
            axes.set_xticks(range(0, mean_LH.shape[1], 2), range(1, mean_LH.shape[1] + 1, 2))
        rows[0].set_ylabel("layer")
        maps.colorbar(picture, ax=rows, label="importance")
        names = ("head imbalance (Eq. 6)", "mean importance", "held-out loss")
        names += ("quiz, margin in nats per token",)
        for axes, name in zip(numbers.subplots(1, len(names)), names, strict=True):
            _arms(axes, name, before, found)
        file.write(rendered(figure, "png"))


def _arms(axes: Any, name: str, before: dict[str, Any], found: dict[str, Any]) -> None:
    """Draw a number of each seed, a line through the arms of a seed."""
    values = np.array([found[arm][name] for arm in LABELS])  # [arm, seed]
    start = NUMBERS[name](before, before)
    if "loss" in name:  # all are far below the model before: what differs is between the arms
        name, values, start = f"{name},\nless that of no loss", values - values[0], float("nan")
    for line in values.T:
        axes.plot(range(len(LABELS)), line, color=GRAY, lw=0.7)
    for at, color in enumerate(COLORS.values()):
        axes.plot([at] * values.shape[1], values[at], "o", color=color, markersize=4)
    if not np.isnan(start):
        axes.axhline(start, color="black", ls=":", lw=1)
    axes.set_xticks(range(len(LABELS)), list(LABELS.values()), rotation=45, ha="right")
    axes.set_title(name.replace(" (", "\n(").replace(", m", ",\nm"))


def draw_surgery(results: Path, path: Path) -> None:
    """Write the loss, attention to the first token and its state over the steps, and by layer.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    found = surgery(results)
    with styled(), atomic_file(path) as file:
        figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
        axes = figure.subplots(2, 3)
        over = {
            "loss, nats per token": lambda stage: np.mean(stage["loss"]),
            "attention to the first token": lambda stage: np.mean(stage["awft"]),
            "norm of the first state\nover the others', largest": lambda s: max(s["massive_ratio"]),
        }
        last = max(steps for _, steps in found)
        for axis, (title, number) in zip(axes[0], over.items(), strict=True):
            for arm, color in VARIANTS.items():
                steps = sorted(s for a, s in found if a == arm)
                axis.plot(
                    steps, [number(found[arm, s]) for s in steps], "o-", color=color, label=arm
                )
            axis.set_title(title)
            axis.set_xlabel("steps")
            axis.set_ylim(bottom=0)
        axes[0, 0].legend()
        by_layer, norms, rounding = axes[1]
        for arm, color in VARIANTS.items():
            if (arm, last) in found:
                _by_layer(by_layer, norms, found[arm, last], f"{arm}, {last}", color, "-")
        _by_layer(by_layer, norms, found["vanilla", 0], "before", "black", ":")
        _by_layer(by_layer, norms, found["sink", 0], "sinks put in", BLUE, ":")
        by_layer.set_title("attention to the first token")
        by_layer.set_xlabel("layer")
        by_layer.legend()
        norms.set_title("norm of the first state\nover the others'")
        norms.set_yscale("log")
        norms.yaxis.set_major_formatter("{x:g}")
        norms.set_xlabel("block")
        _rounding(rounding, found)
        file.write(rendered(figure, "png"))


def _by_layer(attention: Any, norms: Any, stage: Any, label: str, color: str, line: str) -> None:
    attention.plot(np.mean(stage["awft"], 1), line, color=color, label=label)
    norms.plot(stage["massive_ratio"][2::2], line, color=color)  # behind each block


def _rounding(axes: Any, found: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Draw what rounding costs, before and after."""
    stages = {"before": (found["vanilla", 0], "black")}
    for arm, color in VARIANTS.items():
        known = [s for a, s in found if a == arm and "losses" in found[a, s] and s]
        if known:
            stages[arm] = (found[arm, max(known)], color)
    names = [name for name in stages["before"][0]["losses"] if name != "none"]
    for at, (label, (stage, color)) in enumerate(stages.items()):
        plain = np.mean(stage["losses"]["none"])
        rises = [np.mean(stage["losses"][name]) - plain for name in names]
        heights = np.arange(len(names)) + 0.2 * (at - 1.5)
        axes.barh(heights, np.maximum(rises, 1e-4), height=0.18, color=color, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.invert_yaxis()
    axes.set_title("rise of the loss\nwhen rounded, nats")
    axes.legend(fontsize="x-small")
