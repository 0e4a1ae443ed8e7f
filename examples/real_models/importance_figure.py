"""The picture of importance.py: each head, every score's rank correlation, and by layer."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models.importance import find, read_losses, read_scores
from megasink.atomic import atomic_file
from megasink.report.style import BLUE, GRAY, GREEN, VERMILION, WIDTH, rendered, styled

TITLES = {
    "importance": "head importance (P0) = 1 − AWFT",
    "mask_gradient": "gradient of a mask",
    "mask_gradient_signed": "gradient of a mask, signed",
    "mask_gradient_low_entropy": "gradient, low entropy",
    "mask_gradient_high_entropy": "gradient, high entropy",
    "circuit_ahon": "circuit AHON",
    "circuit_ahon_ln": "circuit AHON (LN)",
    "lthon_hn": "LTHON (HN)",
}
_SHOWN = {"importance": BLUE, "ahon_ln": GREEN, "mask_gradient": VERMILION}
"""Scores that are drawn by layer."""


def title_of(score: str) -> str:
    """Return a score's name for people."""
    plain = score.removesuffix("_ln").upper() + (" (LN)" if score.endswith("_ln") else "")
    return TITLES.get(score, plain)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Write a picture with a row for each model.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    with styled(), atomic_file(path) as file:
        figure = Figure(figsize=(WIDTH, 4.6 * len(found)), layout="constrained")
        axes = figure.subplots(len(found), 3, squeeze=False, width_ratios=(1, 1.15, 1))
        for (heads, correlations, layers), model in zip(axes, found, strict=True):
            part = f" ({model['part']})" if model["part"] else ""
            heads.set_title(f"{model['model']}{part}\nloss without each head")
            _heads(figure, heads, model)
            _correlations(correlations, model)
            _layers(layers, model)
        file.write(rendered(figure, "png"))


def _heads(figure: Any, axes: Any, model: dict[str, Any]) -> None:
    """Draw each head's importance and the rise of the loss without it, one color for a layer."""
    losses = read_losses(find(f"zeroing-{model['model']}.jsonl"))
    mean_LH = losses.rise_LHN.mean(-1)
    scores = read_scores(find(f"scores-{model['model']}.json"), losses.weights)
    importance = scores["importance"][: len(mean_LH)]
    layer = np.broadcast_to(np.arange(len(mean_LH))[:, None], mean_LH.shape)
    if (texts := losses.rise_LHN.shape[-1]) > 1:
        error = losses.rise_LHN.std(-1, ddof=1).ravel() / np.sqrt(texts)
        axes.errorbar(importance.ravel(), mean_LH.ravel(), error, fmt="none", ecolor=GRAY, lw=0.5)
    points = axes.scatter(importance, mean_LH, c=layer, cmap="viridis", s=14, zorder=3)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.axhline(0, color=GRAY, lw=0.8)
    axes.set_xlabel("head importance")
    axes.set_ylabel("rise of the loss, nats per token\n(bars: standard error over texts)")
    figure.colorbar(points, ax=axes, label="layer", shrink=0.6)


def _correlations(axes: Any, model: dict[str, Any]) -> None:
    """Draw the rank correlation of every score with its interval, best at the top."""
    rows = list(model["scores"].items())[::-1]
    for height, (_, row) in enumerate(rows):
        for name, color, shift in (("all", BLUE, 0.15), ("within", VERMILION, -0.15)):
            low, high = row[f"{name}_interval"]
            axes.plot([low, high], [height + shift] * 2, color=color, lw=1.2)
            axes.plot(row[name], height + shift, "o", color=color, markersize=4)
    for name, color, label in (
        ("all", BLUE, "all heads"),
        ("within", VERMILION, "within a layer, mean"),
    ):
        axes.plot([], [], "o-", color=color, label=label)
        axes.axvline(model["reachable"][name], color=color, ls=":", lw=1)
    axes.axvline(0, color=GRAY, lw=0.8)
    axes.set_yticks(range(len(rows)), [title_of(name) for name, _ in rows])
    axes.set_xlabel("rank correlation with the rise of the loss\n(dotted: that of other texts)")
    axes.set_title("every score, 95 % intervals")
    axes.legend(loc="lower right")


def _layers(axes: Any, model: dict[str, Any]) -> None:
    """Draw the rank correlation inside each layer."""
    for name, color in _SHOWN.items():
        axes.plot(model["scores"][name]["by_layer"], "o-", color=color, lw=1, label=title_of(name))
    axes.axhline(0, color=GRAY, lw=0.8)
    axes.set_ylim(-1.05, 1.05)
    axes.set_xlabel("layer")
    axes.set_ylabel("rank correlation inside the layer")
    axes.set_title("by layer")
    axes.legend(loc="lower right")
