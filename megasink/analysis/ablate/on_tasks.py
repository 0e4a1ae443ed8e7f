"""Points and scores of a sweep on tasks of lm-evaluation-harness: accuracy.

Shapes: N samples (requests of a task), L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from megasink.analysis.ablate.calibration import scores_of
from megasink.analysis.ablate.points import PointFolder, TaskScore, key_of
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.measurements import MeasuredSample
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.evaluate.harness import TaskScores, evaluate
from megasink.analysis.evaluate.tasks_loading import LoadedTasks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.record import Intervention
from megasink.analysis.interventions.scores import LayerScore
from megasink.analysis.metrics.thresholds import Scores
from megasink.errors import UserError

METRICS = ("acc", "exact_match")
"""The metric of a task, the first that it has; others are not accuracies."""


@dataclass(frozen=True)
class Tasks:
    """What every point of a sweep runs on.

    Attributes:
        names: as on the command line.
        limit: documents of each task; None for all.
        parse_special_tokens: see `TextTokenizer`.
        loaded: the tasks, with their documents.
    """

    names: tuple[str, ...]
    limit: int | None
    batch_size: int
    parse_special_tokens: bool
    loaded: LoadedTasks

    def facts(self) -> dict[str, Any]:
        """Return what a point depends on, beside the model."""
        return {
            "tasks": list(self.names),
            "limit": self.limit,
            "batch_size": self.batch_size,
            "parse_special_tokens": self.parse_special_tokens,
            "lm_eval": version("lm_eval"),
        }

    def measure(
        self,
        model: ProbedModel,
        interventions: Sequence[Intervention],
        changes: Sequence[HeadChange],
    ) -> tuple[list[MeasuredSample], dict[str, TaskScore]]:
        """Return the accuracy in each task.

        Raises:
            UserError: a task has no accuracy, or as `evaluate`.
        """
        results = evaluate(
            model,
            interventions,
            self.loaded,
            limit=self.limit,
            batch_size=self.batch_size,
            parse_special_tokens=self.parse_special_tokens,
            changes=changes,
        ).tasks
        members = {name for task in results.values() for name in task.of}
        return [], {name: _score(name, of) for name, of in results.items() if name not in members}

    def scores(
        self,
        model: ProbedModel,
        names: Sequence[str],
        facts: dict[str, Any],
        folder: PointFolder,
        ranks: Ranks,
    ) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H], over all requests (P3.11).

        One process measures; the file stays in the folder.
        """
        if ranks.rank:
            ranks.await_first("scored")
        scores = folder.arrays(
            f"scores-{key_of(facts | {'scores': list(names)})}",
            lambda: self._measured(model, names),
        )
        if not ranks.rank:
            ranks.reach("scored")
        return scores

    def _measured(self, model: ProbedModel, names: Sequence[str]) -> dict[str, Scores]:
        observed = {name: DynamicChange(LayerScore(name), None, 0) for name in names}
        for change in observed.values():
            change.keeps_scores = True
        self.measure(model, (), list(observed.values()))
        return {name: scores_of(change, model.heads) for name, change in observed.items()}


def _score(name: str, of: TaskScores) -> TaskScore:
    for key, score in of.metrics.items():
        if key.split(",")[0] in METRICS:
            error = score.standard_error
            return TaskScore(
                metric=key,
                version=of.version,
                value=100 * score.value,
                standard_error=None if error is None else 100 * error,
                samples=of.documents,
            )
    raise UserError(
        f"--task {name} has {', '.join(of.metrics)}, and no accuracy: pass its texts as --data for "
        "a loss"
    )
