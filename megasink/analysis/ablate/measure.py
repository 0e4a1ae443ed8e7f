"""Measure the points of an ablation: a model under interventions, on texts or on tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import megasink
from megasink.analysis.ablate.points import MeasuredPoint, PointFolder
from megasink.analysis.ablate.results import UNCHANGED
from megasink.analysis.ablate.settings import Setting
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import changes_of
from megasink.analysis.metrics.thresholds import Scores
from megasink.typed_json import to_json

if TYPE_CHECKING:
    from megasink.analysis.ablate.on_tasks import Tasks
    from megasink.analysis.ablate.on_texts import Texts


@dataclass(frozen=True)
class Ablation:
    """What all points of an ablation share.

    Attributes:
        weights: hash of the model's weights.
        on: what every point runs on.
        folder: keeps what is measured.
        ranks: processes that share the points.
    """

    model: ProbedModel
    weights: str
    on: "Texts | Tasks"
    folder: PointFolder
    ranks: Ranks

    def facts(self, setting: Setting) -> dict[str, Any]:
        """Return everything that a point depends on."""
        return {
            "model": self.model.facts["kind"],
            "weights": self.weights,
            "dtype": self.model.facts["dtype"],
            "attention": self.model.facts["attention"],
            "device": self.model.device.type,
            "interventions": to_json(setting.entries),
            "megasink": megasink.__version__,
            "torch": torch.__version__,
            **self.on.facts(),
        }

    def measured(self, setting: Setting, facts: dict[str, Any]) -> MeasuredPoint:
        """Run a point."""
        changes = changes_of(setting.interventions)
        texts, tasks = self.on.measure(self.model, setting.interventions, changes)
        zeroed = next((change for change in changes if isinstance(change, DynamicChange)), None)
        return MeasuredPoint(
            facts=facts,
            zeroed=None if zeroed is None else zeroed.share,
            zeroed_LH=None if zeroed is None else to_json(zeroed.share_LH),
            texts=texts,
            tasks=tasks,
        )

    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H] (P3.11)."""
        facts = self.facts(Setting(UNCHANGED, UNCHANGED))
        return self.on.scores(self.model, names, facts, self.folder, self.ranks)
