"""Measure one point: a model under interventions, on texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

import megasink
from megasink.intervene import DynamicChange
from megasink.intervene.points import MeasuredPoint, TaskScore, TextLoss, texts_hash
from megasink.intervene.record import Intervention
from megasink.intervene.settings import Setting
from megasink.probe.base import ProbedModel
from megasink.probe.changes import HeadChange
from megasink.probe.inputs import Sample
from megasink.probe.recorder import Recorder
from megasink.probe.run import run
from megasink.typed_json import to_json


@dataclass(frozen=True)
class Texts:
    """What every point of a sweep runs on.

    Attributes:
        samples: texts, as the unchanged model reads them.
        first: number of tokens before every text that belong to the model.
        token_bytes: bytes of each token; None if they do not add up to the text.
    """

    samples: Sequence[Sample]
    batch_size: int
    first: int
    token_bytes: NDArray[np.int32] | None

    def facts(self) -> dict[str, Any]:
        """Return what a point depends on."""
        return {
            "texts": texts_hash(self.samples),
            "batch_size": self.batch_size,
            "bytes": self.token_bytes is not None,
        }

    def measure(
        self, model: ProbedModel, interventions: Sequence[Intervention]
    ) -> tuple[list[HeadChange], list[TextLoss], dict[str, TaskScore]]:
        """Return the changes after their run, and the loss of each text."""
        changes = [change for i in interventions if (change := i.change()) is not None]
        recorder = Recorder(model.heads, ())
        with model.open_probe(recorder, changes) as probe:
            measurements = run(
                probe,
                recorder,
                [self._changed(sample, interventions, model) for sample in self.samples],
                batch_size=self.batch_size,
                device=model.device,
                token_bytes=self.token_bytes,
                console=Console(quiet=True),
            )
        assert measurements is not None  # one process
        losses = [
            TextLoss(
                sample=found.index,
                dataset=found.dataset,
                nats=found.nats,
                targets=found.targets or 0,
                bytes=found.bytes,
                nats_of_bytes=found.nats_of_bytes,
            )
            for found in measurements.samples
        ]
        return changes, losses, {}

    def _changed(
        self, sample: Sample, interventions: Sequence[Intervention], model: ProbedModel
    ) -> Sample:
        head, tokens = sample.tokens[: self.first], list(sample.tokens[self.first :])
        for intervention in interventions:
            tokens = intervention.tokens(tokens, model.tokenizer.bos_token_id)
        return replace(sample, tokens=(*head, *tokens))


def scored_alike(samples: Sequence[Sample], first: int, bos: int | None) -> list[Sample]:
    """Return samples whose loss is on the text without its first token.

    These targets are the same whatever an intervention puts in front of them (P4.4).
    """
    return [
        replace(s, scored=len(s.tokens) - first - 1 - (s.tokens[first] == bos)) for s in samples
    ]


def facts_of(model: ProbedModel, weights: str, on: Texts, setting: Setting) -> dict[str, Any]:
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
    model: ProbedModel, on: Texts, setting: Setting, facts: dict[str, Any]
) -> MeasuredPoint:
    """Run a point."""
    changes, texts, tasks = on.measure(model, setting.interventions)
    zeroed = next((change for change in changes if isinstance(change, DynamicChange)), None)
    share_LH = None if zeroed is None else np.asarray(zeroed.share_LH, dtype=np.float64)
    return MeasuredPoint(
        facts=facts,
        zeroed=None if zeroed is None else float(zeroed.share),
        zeroed_LH=to_json(share_LH),
        texts=texts,
        tasks=tasks,
    )
