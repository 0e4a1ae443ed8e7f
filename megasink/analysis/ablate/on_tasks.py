"""Points and scores of a sweep on tasks of lm-evaluation-harness: accuracy.

Shapes: N samples (requests of a task), L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megasink.analysis.ablate.calibration import scores_of
from megasink.analysis.ablate.measure import Ablation, Measured
from megasink.analysis.ablate.points import TaskScore, key_of
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.evaluate.harness import TaskScores, evaluate
from megasink.analysis.evaluate.tasks_loading import LoadedTasks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import Intervention
from megasink.analysis.interventions.scores import LayerScore
from megasink.analysis.metrics.thresholds import Scores
from megasink.analysis.options import AblationOptions
from megasink.errors import UserError

METRICS = ("acc", "exact_match")
"""The metric of a task, the first that it has; others are not accuracies."""


@dataclass(frozen=True)
class OnTasks(Ablation):
    """An ablation on tasks."""

    # The tasks, the documents of each, and what else a measurement depends on.
    options: AblationOptions
    tasks: LoadedTasks  # with their documents

    def ground(self) -> dict[str, Any]:
        return {
            "tasks": list(self.options.tasks or ()),
            **self.options.some("limit", "batch_size", "parse_special_tokens"),
            "lm_eval": version("lm_eval"),
        }

    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Return the accuracy in each task; see `Ablation.run`."""
        results = evaluate(
            self.model,
            interventions,
            self.tasks,
            **self.options.some("limit", "batch_size", "parse_special_tokens"),
            samples=True,
            changes=changes,
        )
        members = {name for task in results.tasks.values() for name in task.of}
        return [], {
            name: _score(name, of, results.samples.get(name, []))
            for name, of in results.tasks.items()
            if name not in members
        }

    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of all requests, measured by one process; see `Ablation.scores`."""
        if self.ranks.rank:
            self.ranks.await_first("scored")
        key = key_of(self.facts() | {"scores": list(names)})
        scores = self.folder.arrays(f"scores-{key}", lambda: self._scores(names))
        if not self.ranks.rank:
            self.ranks.reach("scored")
        return scores

    def _scores(self, names: Sequence[str]) -> dict[str, Scores]:
        observed = {name: DynamicChange(LayerScore(name), None, 0) for name in names}
        for change in observed.values():
            change.keeps_scores = True
        self.run((), list(observed.values()))
        return {name: scores_of(change, self.model.heads) for name, change in observed.items()}


def _score(name: str, of: TaskScores, samples: Sequence[dict[str, Any]]) -> TaskScore:
    for key, score in of.metrics.items():
        metric, _, kind = key.partition(",")
        if metric in METRICS:
            error = score.standard_error
            return TaskScore(
                metric=key,
                version=of.version,
                value=100 * score.value,
                standard_error=None if error is None else 100 * error,
                samples=of.documents,
                of_each=[
                    float(sample[metric])
                    for sample in sorted(samples, key=lambda sample: sample["doc_id"])
                    if sample["filter"] == (kind or "none")
                ],
            )
    raise UserError(
        f"--tasks {name} has no accuracy, only {', '.join(of.metrics)}: pass its texts as --data "
        "to measure a loss"
    )
