"""Measure one point of a sweep: a model under interventions, on texts or on tasks."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

import megasink
from megasink.analysis.ablate.points import MeasuredPoint, PointFolder, TaskScore, TextLoss
from megasink.analysis.ablate.settings import Setting
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import Intervention, changes_of
from megasink.analysis.metrics.thresholds import Scores
from megasink.typed_json import to_json


class Ground(Protocol):
    """What every point of a sweep runs on: texts, or tasks."""

    def facts(self) -> dict[str, Any]:
        """Return what a point depends on, beside the model."""

    def measure(
        self,
        model: ProbedModel,
        interventions: Sequence[Intervention],
        changes: Sequence[HeadChange],
    ) -> tuple[list[TextLoss], dict[str, TaskScore]]:
        """Return the loss of each text and the accuracy in each task; one of them is empty.

        Args:
            changes: those of the interventions.
        """

    def scores(
        self,
        model: ProbedModel,
        names: Sequence[str],
        facts: dict[str, Any],
        folder: PointFolder,
        ranks: Ranks,
    ) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H].

        Args:
            facts: of the unchanged model, for the name of the file.
            folder: keeps the scores.
        """


def facts_of(model: ProbedModel, weights: str, on: Ground, setting: Setting) -> dict[str, Any]:
    """Return everything that a point depends on."""
    return {
        "model": model.facts["kind"],
        "weights": weights,
        "dtype": model.facts["dtype"],
        "attention": model.facts["attention"],
        "device": model.device.type,
        "interventions": to_json(setting.entries),
        "megasink": megasink.__version__,
        "torch": torch.__version__,
        **on.facts(),
    }


def measured(
    model: ProbedModel, on: Ground, setting: Setting, facts: dict[str, Any]
) -> MeasuredPoint:
    """Run a point."""
    changes = changes_of(setting.interventions)
    texts, tasks = on.measure(model, setting.interventions, changes)
    zeroed = next((change for change in changes if isinstance(change, DynamicChange)), None)
    return MeasuredPoint(
        facts=facts,
        zeroed=None if zeroed is None else zeroed.share,
        zeroed_LH=None if zeroed is None else to_json(zeroed.share_LH),
        texts=texts,
        tasks=tasks,
    )
