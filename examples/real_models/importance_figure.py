"""The picture of importance.py: each head, each score's rank correlations, and by layer."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models.importance import find, read_losses, read_scores
from megasink.figures.style import BLUE, GRAY, GREEN, VERMILION, WIDTH, rendered, styled
from megasink.files.atomic import atomic_file

TITLES = {
    "random": "random heads",
    "importance": "head importance",
    "mask_gradient": "gradient",
    "mask_gradient_signed": "gradient, signed",
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
        figure = Figure(figsize=(WIDTH, 4.4 * len(found)), layout="constrained")
        axes = figure.subplots(len(found), 4, squeeze=False, width_ratios=(1.1, 1, 1, 0.9))
        for (heads, divergence, rise, layers), model in zip(axes, found, strict=True):
            part = f" ({model['part'].replace(', ', chr(10))})" if model["part"] else ""
            heads.set_title(f"{model['model']}{part}\nevery head")
            _heads(figure, heads, model)
            rows = model["kl"]["scores"]
            names = sorted(rows, key=lambda name: np.nan_to_num(rows[name]["all"], nan=-1))
            _correlations(divergence, model["kl"], names, "divergence")
            _correlations(rise, model["rise"], names, "rise of the loss")
            divergence.set_yticks(range(len(names)), map(title_of, names))
            rise.set_yticks(range(len(names)), [""] * len(names))
            _layers(layers, model)
        file.write(rendered(figure, "png"))


def _heads(figure: Any, axes: Any, model: dict[str, Any]) -> None:
    """Draw each head's importance and the divergence without it, one color for a layer."""
    from matplotlib.ticker import NullFormatter

    losses = read_losses(find(f"zeroing-{model['model']}.jsonl"))
    mean_LH = losses.kl_LHM.mean(-1)
    scores = read_scores(find(f"scores-{model['model']}.json"), losses.weights)
    layer = np.broadcast_to(np.arange(len(mean_LH))[:, None], mean_LH.shape)
    importance = scores["importance"][: len(mean_LH)]
    points = axes.scatter(importance, mean_LH, c=layer, cmap="viridis", s=14, zorder=3)
    axes.set_yscale("log" if (mean_LH > 0).any() else "linear")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("head importance (P0)")
    axes.set_ylabel("divergence without the head, nats per token")
    figure.colorbar(points, ax=axes, label="layer", shrink=0.6, location="bottom")


def _correlations(axes: Any, found: dict[str, Any], names: list[str], what: str) -> None:
    """Draw the rank correlation of every score with its interval, the best at the top."""
    for name, color, label, shift in (
        ("all", BLUE, "all heads", 0.15),
        ("within", VERMILION, "in a layer, mean", -0.15),
    ):
        for height, score in enumerate(names):
            row = found["scores"][score]
            axes.plot(row[f"{name}_interval"], [height + shift] * 2, color=color, lw=1.2)
            axes.plot(row[name], height + shift, "o", color=color, markersize=3)
        axes.plot([], [], "o-", color=color, label=label)
        axes.axvline(found["reachable"][name], color=color, ls=":", lw=1)
    axes.axvline(0, color=GRAY, lw=0.8)
    axes.set_xlim(-1, 1)
    axes.set_title(f"rank correlation with\nthe {what}, 95 %")
    axes.plot([], [], ":", color=GRAY, label="reached by other texts")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _layers(axes: Any, model: dict[str, Any]) -> None:
    """Draw the rank correlation inside each layer."""
    for name, color in _SHOWN.items():
        by_layer = model["kl"]["scores"][name]["by_layer"]
        axes.plot(by_layer, "o-", color=color, lw=1, label=title_of(name))
    axes.axhline(0, color=GRAY, lw=0.8)
    axes.set_ylim(-1.05, 1.05)
    axes.set_xlabel("layer")
    axes.set_title("rank correlation with\nthe divergence, by layer")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
