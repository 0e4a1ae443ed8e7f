"""Points and scores of a sweep on texts: the loss of each text.

Shapes: N samples, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from megasink.analysis.ablate.points import PointFolder, TaskScore, key_of, texts_hash
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.measurements import MeasuredSample, merge_shards
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.shards import PartialFolder, plan
from megasink.analysis.interventions.record import Intervention
from megasink.analysis.interventions.scores import LayerScore
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.thresholds import Scores
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.summary import scores_of

_SEED = 0
"""Of random scores, which no threshold is taken from."""


@dataclass(frozen=True)
class Texts:
    """What every point of a sweep runs on.

    Attributes:
        samples: texts, as the unchanged model reads them.
        options: what else a measurement depends on.
        first: number of tokens before every text that belong to the model.
        token_bytes: bytes of each token; None if they do not add up to the text.
    """

    samples: Sequence[Sample]
    options: AnalysisOptions
    first: int
    token_bytes: NDArray[np.int32] | None

    def facts(self) -> dict[str, Any]:
        """Return what a point depends on, beside the model."""
        return {
            "texts": texts_hash(self.samples),
            "batch_size": self.options.batch_size,
            "bytes": self.token_bytes is not None,
        }

    def measure(
        self,
        model: ProbedModel,
        interventions: Sequence[Intervention],
        changes: Sequence[HeadChange],
    ) -> tuple[list[MeasuredSample], dict[str, TaskScore]]:
        """Return the loss of each text."""
        measurements = measure(
            model,
            [self._changed(sample, interventions, model) for sample in self.samples],
            replace(self.options, loss=True),
            (),
            changes=changes,
            token_bytes=self.token_bytes,
            console=Console(quiet=True),
        )
        assert measurements is not None  # one process
        return measurements.samples, {}

    def _changed(
        self, sample: Sample, interventions: Sequence[Intervention], model: ProbedModel
    ) -> Sample:
        head, tokens = sample.tokens[: self.first], list(sample.tokens[self.first :])
        for intervention in interventions:
            tokens = intervention.tokens(tokens, model.tokenizer.bos_token_id)
        return replace(sample, tokens=(*head, *tokens))

    def scores(
        self,
        model: ProbedModel,
        names: Sequence[str],
        facts: dict[str, Any],
        folder: PointFolder,
        ranks: Ranks,
    ) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H].

        The processes share the texts. The measurements stay in the folder, so that the same sweep
        need not run them again.
        """
        of = {base for name in names for base in LayerScore(name).of_statistics}
        needed = [name for name in metrics() if name in of]
        facts = facts | {"scores": needed}
        partial = PartialFolder(folder.path(f"scores-{key_of(facts)}"), facts)
        options = replace(self.options, loss=False, positions=1, columns=1)
        measure(model, self.samples, options, needed, partial=partial, ranks=ranks)
        if ranks.rank:
            ranks.await_first("scored")
        else:
            ranks.reach("scored")
        shards = partial.read(len(plan(self.samples, self.options.batch_size)))
        return scores_of(merge_shards(shards, model.heads).analysis_values(_SEED))


def scored_alike(samples: Sequence[Sample], first: int, bos: int | None) -> list[Sample]:
    """Return samples whose loss is on the text without its first token.

    These targets are the same whatever an intervention puts in front of them (P4.4).
    """
    return [
        replace(s, scored=len(s.tokens) - first - 1 - (s.tokens[first] == bos)) for s in samples
    ]
