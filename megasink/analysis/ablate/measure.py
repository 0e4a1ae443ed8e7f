"""Measure the points of an ablation, on texts or on tasks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megasink.analysis.ablate.points import MeasuredPoint, PointFolder, TaskScore
from megasink.analysis.ablate.settings import Setting
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.measurements import MeasuredSample
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import Intervention, changes_of
from megasink.analysis.metrics.thresholds import Scores
from megasink.files.checked_fields import to_json

Measured = tuple[list[MeasuredSample], dict[str, TaskScore]]
"""Each text with its loss, and each task with its accuracy; one of them is empty."""


@dataclass(frozen=True)
class Ablation(ABC):
    """Base class of an ablation; a subclass defines the inputs of its points."""

    model: ProbedModel
    identity: dict[str, Any]  # of the model, see `model_identity`
    folder: PointFolder  # keeps what is measured
    ranks: Ranks  # processes that share the points

    @abstractmethod
    def ground(self) -> dict[str, Any]:
        """Return the settings of a point, without the model."""

    @abstractmethod
    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Run the model under interventions; the caller applies the changes of heads."""

    @abstractmethod
    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H] (P3.11).

        Measurements stay in the folder, so that the same sweep does not repeat them.
        """

    def facts(self, interventions: Sequence[Any] = ()) -> dict[str, Any]:
        """Return every setting of a point, including the entries of its interventions."""
        return {
            "model": self.model.facts["kind"],
            **self.identity,
            "dtype": self.model.facts["dtype"],
            "attention": self.model.facts["attention"],
            "device": self.model.device.type,
            "interventions": to_json(list(interventions)),
            **self.ground(),
        }

    def measured(self, setting: Setting, facts: dict[str, Any]) -> MeasuredPoint:
        """Run a point."""
        changes = changes_of(setting.interventions)
        texts, tasks = self.run(setting.interventions, changes)
        zeroed = next((change for change in changes if isinstance(change, DynamicChange)), None)
        return MeasuredPoint(
            facts=facts,
            zeroed=None if zeroed is None else zeroed.share,
            zeroed_LH=None if zeroed is None else to_json(zeroed.share_LH),
            texts=texts,
            tasks=tasks,
        )
