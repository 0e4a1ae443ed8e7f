"""Measure one point of a sweep: a model under interventions, on texts or on tasks."""

from typing import TYPE_CHECKING, Any

import torch

import megasink
from megasink.analysis.ablate.on_texts import Texts
from megasink.analysis.ablate.points import MeasuredPoint
from megasink.analysis.ablate.settings import Setting
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import changes_of
from megasink.typed_json import to_json

if TYPE_CHECKING:
    from megasink.analysis.ablate.on_tasks import Tasks


def facts_of(
    model: ProbedModel, weights: str, on: "Texts | Tasks", setting: Setting
) -> dict[str, Any]:
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
    model: ProbedModel, on: "Texts | Tasks", setting: Setting, facts: dict[str, Any]
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
