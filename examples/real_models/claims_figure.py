"""The picture of claims.py: sinks by layer, by length, and what zeroing heads costs."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models.importance_figure import title_of
from examples.real_models.wheels import sources
from megasink.figures.style import (
    BLUE,
    GRAY,
    GREEN,
    PALETTE,
    VERMILION,
    WIDTH,
    rendered,
    styled,
)
from megasink.files.atomic import atomic_file

SCORES = {
    "random": (GRAY, ":", "s"),
    "awft": (VERMILION, "--", "^"),
    "ahon_ln": (BLUE, "-", "o"),
    "circuit_ahon_ln": (GREEN, "-.", "D"),
}
_SETTINGS = {"": (BLUE, "-", "o", "without BOS"), "_bos": (VERMILION, "--", "^", "with BOS")}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Write a picture with a row for each model.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    with styled(), atomic_file(path) as file:
        figure = Figure(figsize=(WIDTH, 3.4 * len(found)), layout="constrained")
        axes = figure.subplots(len(found), 4, squeeze=False)
        for (layers, norms, lengths, zeroed), model in zip(axes, found, strict=True):
            _layers(layers, norms, model)
            _lengths(lengths, model["curves"]["sink_rates"])
            _zeroed(zeroed, model["curves"])
        file.write(rendered(figure, "png"))


def _layers(rates: Any, norms: Any, model: dict[str, Any]) -> None:
    """Draw the sink rate of each layer, and the first token's norm after each block."""
    for setting, (color, line, marker, label) in _SETTINGS.items():
        if f"massive_ratio{setting}" not in model["curves"]:
            continue  # there is no BOS
        style = {"color": color, "ls": line, "marker": marker, "label": label}
        rates.plot(model["curves"][f"sink_rate_by_layer{setting}"], **style)
        norms.plot(model["curves"][f"massive_ratio{setting}"][2::2], **style)
    rates.set_ylim(-0.03, 1.03)
    known = sources()["models"].get(model["model"], {"title": model["model"]})
    rates.set_title(f"{known['title']}\nheads with a sink on the first token")
    rates.set_ylabel("share of the layer's heads")
    norms.set_yscale("log")
    norms.yaxis.set_major_formatter("{x:g}")
    norms.set_title("norm of the first token\nover that of the others")
    norms.set_ylabel("ratio after the block")
    rates.set_xlabel("layer")
    norms.set_xlabel("block")
    rates.legend()


def _lengths(axes: Any, rates: list[dict[str, Any]]) -> None:
    """Draw the sink rate by length, a line for each epsilon; other texts where they are long."""
    colors = dict(
        zip(("0.2", "0.3", "0.4", "0.5"), (PALETTE[4], BLUE, GREEN, VERMILION), strict=True)
    )
    for epsilon, color in colors.items():
        for long, line in ((False, "-"), (True, "--")):
            rows = [row for row in rates if row["long"] == long]
            tokens, values = zip(*((r["tokens"], r["rates"][epsilon]) for r in rows), strict=True)
            label = None if long else f"above {epsilon}"
            axes.plot(tokens, values, line, marker="o", color=color, markersize=3, label=label)
    axes.plot([], [], "--", color=GRAY, label="long texts")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(-0.03, 1.03)
    axes.set_title("heads with a sink,\nby length and threshold")
    axes.set_xlabel("tokens of the text")
    axes.legend(fontsize="x-small")


def _zeroed(axes: Any, curves: dict[str, Any]) -> None:
    """Draw the loss over the share of heads that are zeroed in each text."""
    for score, (color, line, marker) in SCORES.items():
        x, y = curves["ablation"][score]
        style = {"color": color, "ls": line, "marker": marker, "label": title_of(score)}
        axes.plot(x, np.array(y) - curves["loss"], **style)
    axes.set_title("what zeroing heads costs,\nby the score that marks them")
    axes.set_xlabel("heads zeroed, percent")
    axes.set_ylabel("rise of the loss, nats per token")
    axes.legend()
