"""Points and scores of a sweep on texts: the loss of each text.

Shapes: N samples, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from megasink.analysis.ablate.measure import Ablation, Measured
from megasink.analysis.ablate.points import key_of, texts_hash
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.measurements import merge_shards
from megasink.analysis.capture.shards import PartialFolder, plan
from megasink.analysis.interventions.record import Intervention
from megasink.analysis.interventions.scores import statistics_of
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.thresholds import Scores
from megasink.analysis.options import AblationOptions
from megasink.analysis.summary import scores_of
from megasink.data.token_bytes import TokenBytes

_SEED = 0
"""Of random scores, which no threshold is taken from."""


@dataclass(frozen=True)
class OnTexts(Ablation):
    """An ablation on texts."""

    samples: Sequence[Sample]  # texts, as the unchanged model reads them
    options: AblationOptions  # what else a measurement depends on
    token_bytes: TokenBytes | None  # bytes of each token; None if they do not add up to the text

    def ground(self) -> dict[str, Any]:
        return {
            "texts": texts_hash(self.samples),
            "batch_size": self.options.batch_size,
            "bytes": self.token_bytes is not None,
        }

    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Return the loss of each text; see `Ablation.run`."""
        measurements = measure(
            self.model,
            [self._changed(sample, interventions) for sample in self.samples],
            replace(self.options, loss=True),
            (),
            changes=changes,
            token_bytes=self.token_bytes,
            console=Console(quiet=True),
        )
        assert measurements is not None  # one process
        return measurements.samples, {}

    def _changed(self, sample: Sample, interventions: Sequence[Intervention]) -> Sample:
        first = len(self.model.first)
        head, tokens = sample.tokens[:first], list(sample.tokens[first:])
        for intervention in interventions:
            tokens = intervention.tokens(tokens, self.model.tokenizer.bos_token_id)
        return replace(sample, tokens=(*head, *tokens))

    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of all texts, divided among the processes; see `Ablation.scores`."""
        scores = metrics(names).values()
        of = {name: entry for score in scores for name, entry in statistics_of(score).items()}
        needed = [name for name in metrics() if name in of]
        facts = self.facts() | {"scores": needed}
        partial = PartialFolder(self.folder.path(f"scores-{key_of(facts)}"), facts)
        loss = any(entry.takes_backward for entry in of.values())
        options = replace(self.options, loss=loss, positions=1, columns=1)
        measure(self.model, self.samples, options, needed, partial=partial, ranks=self.ranks)
        if self.ranks.rank:
            self.ranks.await_first("scored")
        else:
            self.ranks.reach("scored")
        shards = partial.read(len(plan(self.samples, self.options.batch_size)))
        return scores_of(merge_shards(shards, self.model.heads).analysis_values(_SEED))

    def scored_alike(self) -> "OnTexts":
        """Return this ablation with the first token of each text left out of the loss.

        These targets are the same whatever an intervention puts in front of them (P4.4).
        """
        first, bos = len(self.model.first), self.model.tokenizer.bos_token_id
        alike = [
            replace(s, scored=len(s.tokens) - first - 1 - (s.tokens[first] == bos))
            for s in self.samples
        ]
        return replace(self, samples=alike)
