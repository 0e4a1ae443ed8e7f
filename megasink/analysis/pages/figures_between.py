"""Figures of the distances between models."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megasink.analysis.folder import Analysis
from megasink.analysis.metrics import metrics, metrics_shown
from megasink.analysis.metrics.distances import wasserstein
from megasink.analysis.pages.drawing import Drawing
from megasink.analysis.pages.style import MAP, heatmap, panels, short, write_cells


def _distances(analyses: Sequence[Analysis]) -> Any:
    if len(analyses) < 3:
        return None  # the table shows it
    pooled = [n for n in metrics_shown("wasserstein") if all(n in a.by_sample for a in analyses)]
    figure, axes = panels(1, len(pooled), min(9.0, 2.6 + 0.28 * len(analyses)))
    names = [short(analysis.name, 24) for analysis in analyses]
    for axis, score in zip(axes[0], pooled, strict=True):
        table = np.asarray(
            [
                [wasserstein(a.by_sample[score], b.by_sample[score]) for b in analyses]
                for a in analyses
            ]
        )
        image = heatmap(axis, table, vmin=0, cmap=MAP)
        if len(names) <= 8:
            write_cells(axis, image, table, 7)
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        axis.set_yticks(range(len(names)), names)
        axis.set_title(metrics()[score].title)
        figure.colorbar(image, ax=axis, label="Wasserstein distance")
    return figure


DRAWINGS = (
    Drawing(
        "distances",
        "Between models",
        "Distances between score distributions",
        "Wasserstein distance between the scores of each pair of models, pooled over samples, "
        "layers and heads (P3.21).",
        _distances,
    ),
)
