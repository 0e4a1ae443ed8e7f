"""MLP activations of layer 0 with each of its heads zeroed alone, by t-SNE (P4.6, P4.7).

Shapes: N points (tokens of a few samples).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from megasink.analysis.ablate.points import OnTexts
from megasink.analysis.ablate.settings import Setting
from megasink.analysis.capture.geometry import read_rows
from megasink.analysis.capture.sites import PRODUCT
from megasink.analysis.interventions.kinds import changes_of
from megasink.analysis.metrics.geometry import Floats, neighbor_embedding
from megasink.analysis.store import key_of
from megasink.console.progress import tracked
from megasink.errors import UserError

POSITION = "position_N"


def activations(ablation: OnTexts, settings: Sequence[Setting], seed: int) -> dict[str, Floats]:
    """Return tsne.npz: label -> t-SNE [N, 2], and `POSITION` [N]."""
    coordinates: dict[str, Floats] = {}
    console = Console(stderr=True)
    for setting in tracked(settings, "t-SNE", len(settings), "settings", console=console):
        key = f"tsne-{key_of(ablation.facts(setting.entries) | {'seed': seed})}"
        arrays = ablation.kept(key, partial(_embedded, ablation, setting, seed))
        coordinates[setting.label], coordinates[POSITION] = arrays["points"], arrays["position"]
    return coordinates


def _embedded(ablation: OnTexts, setting: Setting, seed: int) -> dict[str, Floats]:
    model = ablation.model

    def open_probe(listener: Any, changes: Any = ()) -> Any:
        made = changes_of(setting.interventions)
        return model.open_probe(listener, [*changes, *made])

    rows = read_rows(open_probe, ablation.samples, device=model.device)
    if PRODUCT not in rows.by_site:
        raise UserError(f"--layer 0: its MLP activations cannot be drawn: {rows.missing[PRODUCT]}")
    try:
        embedded = neighbor_embedding(rows.by_site[PRODUCT].astype(np.float64), seed)
    except ValueError as error:
        raise UserError(f"--layer 0: {error}: use more or longer texts") from error
    return {"points": embedded.points, "position": rows.position_N.astype(np.float64)}
