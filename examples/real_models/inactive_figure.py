"""The picture of inactive heads: accuracy when they are zeroed, and their share by length."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.real_models.claims_figure import SCORES
from examples.real_models.importance_figure import title_of
from examples.real_models.wheels import sources
from megasink.figures.style import GRAY, WIDTH, rendered, styled
from megasink.files.atomic import atomic_file


def draw_inactive(found: list[dict[str, Any]], path: Path) -> None:
    """Write a picture of the models of claims.json: a task, and long texts.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    with styled(), atomic_file(path) as file:
        figure = Figure(figsize=(WIDTH, 6.4), layout="constrained")
        rows = figure.subplots(2, len(found), squeeze=False)
        for above, below, model in zip(*rows, found, strict=True):
            _task(above, model)
            _lengths(below, model)
        file.write(rendered(figure, "png"))


def _title(model: dict[str, Any]) -> str:
    return str(sources()["models"].get(model["model"], {"title": model["model"]})["title"])


def _task(axes: Any, model: dict[str, Any]) -> None:
    """Draw the accuracy over the heads zeroed; bars are of the change, by questions in pairs."""
    for score, line in model["curves"]["task"].items():
        color, style, marker = SCORES[score]
        y, (low, high) = np.array(line["accuracy"]), np.array(line["interval"]).T
        axes.errorbar(
            line["zeroed"],
            y,
            yerr=(y - low, high - y),
            color=color,
            ls=style,
            marker=marker,
            capsize=2,
            label=title_of(score),
        )
    axes.axhline(25, color=GRAY, lw=0.8, ls="--")
    axes.set_title(f"{_title(model)}\ntask, by the score that marks heads")
    axes.set_xlabel("heads zeroed, percent")
    axes.set_ylabel("questions answered right, percent")
    axes.legend()


def _lengths(axes: Any, model: dict[str, Any]) -> None:
    """Draw the share of inactive heads of each long text, by its length."""
    cut = model["curves"]["cut"]
    for score in ("awft", "ahon_ln"):
        color, _, marker = SCORES[score]
        axes.plot(cut["tokens"], cut[score], marker, color=color, label=title_of(score))
    axes.axhline(0.15, color=GRAY, lw=0.8, ls="--")
    axes.set_ylim(-0.03, None)
    axes.set_title(f"{_title(model)}\nlong texts cut at random")
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("share of inactive heads")
    axes.legend()
