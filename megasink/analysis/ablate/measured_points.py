"""Measured points of an ablation, on texts or on tasks, each in a file named by its settings' hash.

A killed, repeated or extended sweep, or another command, finds the existing points.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from rich.console import Console

from megasink.analysis.ablate.settings import Setting, scores_of
from megasink.analysis.analysis_summary import scores_of as scores_in
from megasink.analysis.capture.head_changes import HeadChange
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.measurements import Floats, MeasuredSample
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.evaluate.harness import TaskScores, evaluate
from megasink.analysis.evaluate.tasks_loading import LoadedTasks
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange, LayerScore, statistics_of
from megasink.analysis.interventions.intervention_types import Intervention, changes_of
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.inactive_heads import Scores
from megasink.analysis.options import AblationOptions
from megasink.analysis.result_store import Store, key_of
from megasink.data.token_bytes import TokenBytes
from megasink.errors import UserError
from megasink.files.checked_fields import from_json, to_json

ACCURACIES = ("acc", "exact_match")
"""Accuracy metrics. The score of a task is the first one that it reports."""
_SEED = 0
"""Seed of the random scores, which set no threshold."""


@dataclass(kw_only=True)
class TaskScore:
    """The result of one task of lm-eval."""

    metric: str  # its name there
    version: str  # of the task
    # value, standard_error: in percent; the error is that of the value alone, by lm-eval.
    value: float | None
    standard_error: float | None
    samples: int  # number of questions
    # The metric of each question, in order, so that points can be compared in pairs; empty for a
    # group of tasks.
    of_each: list[float]


@dataclass(kw_only=True)
class MeasuredPoint:
    """Contents of one file of the folder points."""

    facts: dict[str, Any]  # everything that the point depends on; its hash is the file's name
    # Share of the model's heads that were zeroed (P3.13), and `zeroed_LH` the share of samples in
    # which each head was; null if the intervention does not count them.
    zeroed: float | None
    zeroed_LH: list[list[float | None]] | None
    texts: list[MeasuredSample]  # each text with its loss, in order, null if infinite or NaN
    tasks: dict[str, TaskScore]  # task -> its result. One of them is empty.


Measured = tuple[list[MeasuredSample], dict[str, TaskScore]]
"""The loss of each text and the accuracy of each task. One of the two is empty."""


@dataclass(frozen=True)
class Ablation(ABC):
    """Base class of an ablation; a subclass defines the inputs of its points."""

    model: ProbedModel
    identity: dict[str, Any]  # of the model
    store: Store  # keeps what is measured
    options: AblationOptions

    @abstractmethod
    def ground(self) -> dict[str, Any]:
        """Return the settings of a point, without the model."""

    @abstractmethod
    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Run the model under interventions; the caller applies the changes of heads."""

    @abstractmethod
    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of the unchanged model, score -> [N, L, H] (P3.11), from the store."""

    def facts(self, interventions: Sequence[Any] = ()) -> dict[str, Any]:
        """Return every setting of a point, including the entries of its interventions."""
        return self.identity | {"interventions": to_json(list(interventions))} | self.ground()

    def measured(self, setting: Setting, facts: dict[str, Any]) -> MeasuredPoint:
        """Run a point."""
        changes = changes_of(setting.interventions)
        texts, tasks = self.run(setting.interventions, changes)
        share, share_LH = None, None
        for change in changes:
            if share is None and isinstance(change, DynamicChange):
                share, share_LH = change.share, to_json(change.share_LH)
        return MeasuredPoint(
            facts=facts, zeroed=share, zeroed_LH=share_LH, texts=texts, tasks=tasks
        )

    def kept(self, name: str, make: Callable[[], Mapping[str, Floats]]) -> dict[str, Floats]:
        """Return the arrays of this name; compute and keep them if they are missing."""
        if not self.store.has(f"{name}.npz"):
            self.store.write(f"{name}.npz", make())
        return self.store.read(f"{name}.npz")


def read_point(store: Store, key: str) -> MeasuredPoint:
    """Return a point of a store."""
    point: MeasuredPoint = from_json(MeasuredPoint, store.read(f"{key}.json"), f"point {key}")
    return point


@dataclass(frozen=True)
class OnTexts(Ablation):
    """An ablation on texts."""

    samples: Sequence[Sample]  # texts, as the unchanged model reads them
    token_bytes: TokenBytes | None  # bytes of each token; None if they do not add up to the text

    def ground(self) -> dict[str, Any]:
        return {
            "texts": key_of([(s.tokens, s.scored, s.dataset) for s in self.samples]),
            "batch_size": self.options.batch_size,
            "bytes": self.token_bytes is not None,
        }

    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Return the loss of each text; see `Ablation.run`."""
        first, samples = len(self.model.first), []
        for sample in self.samples:
            tokens = list(sample.tokens[first:])
            for intervention in interventions:
                tokens = intervention.tokens(tokens, self.model.tokenizer.bos_token_id)
            samples.append(replace(sample, tokens=(*sample.tokens[:first], *tokens)))
        how: dict[str, Any] = {"token_bytes": self.token_bytes, "console": Console(quiet=True)}
        options = replace(self.options, loss=True)
        measurements = measure(self.model, samples, options, (), changes=changes, **how)
        assert measurements is not None  # one process
        return measurements.samples, {}

    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of all texts, divided among the processes; see `Ablation.scores`."""
        scores = metrics(names).values()
        of = {name: entry for score in scores for name, entry in statistics_of(score).items()}
        needed = [name for name in metrics() if name in of]
        facts = self.facts() | {"scores": needed}
        assert self.store.folder is not None
        store = Store(self.store.folder / f"scores-{key_of(facts)}", facts, self.store.ranks)
        loss = any(entry.takes_backward for entry in of.values())
        options = replace(self.options, loss=loss, positions=1, columns=1)
        measurements = measure(
            self.model, self.samples, options, needed, store=store, everywhere=True
        )
        assert measurements is not None
        return scores_in(measurements.analysis_values(_SEED))

    def scored_alike(self) -> "OnTexts":
        """Return this ablation without the loss of first tokens, which may move (P4.4)."""
        first, bos = len(self.model.first), self.model.tokenizer.bos_token_id
        alike = [
            replace(s, scored=len(s.tokens) - first - 1 - (s.tokens[first] == bos))
            for s in self.samples
        ]
        return replace(self, samples=alike)


@dataclass(frozen=True)
class OnTasks(Ablation):
    """An ablation on tasks."""

    tasks: LoadedTasks  # with their documents

    def ground(self) -> dict[str, Any]:
        return {
            "tasks": list(self.options.tasks or ()),
            **self.options.some("limit", "batch_size", "parse_special_tokens"),
            "lm_eval": version("lm_eval"),
        }

    def run(self, interventions: Sequence[Intervention], changes: Sequence[HeadChange]) -> Measured:
        """Return the accuracy in each task; see `Ablation.run`."""
        how = self.options.some("limit", "batch_size", "parse_special_tokens")
        results = evaluate(
            self.model, interventions, self.tasks, **how, samples=True, changes=changes
        )
        members = {name for task in results.tasks.values() for name in task.of}
        return [], {
            name: _score(name, of, results.samples.get(name, []))
            for name, of in results.tasks.items()
            if name not in members
        }

    def scores(self, names: Sequence[str]) -> dict[str, Scores]:
        """Return the scores of all requests, measured by one process; see `Ablation.scores`."""
        ranks = self.store.ranks
        if ranks.rank:
            ranks.wait("scored", 1)
            self.store.check_shared()

        def make() -> dict[str, Scores]:
            observed = {name: DynamicChange(LayerScore(name), None, 0) for name in names}
            for change in observed.values():
                change.keeps_scores = True
            self.run((), list(observed.values()))
            return {name: scores_of(change, self.model.heads) for name, change in observed.items()}

        scores = self.kept(f"scores-{key_of(self.facts() | {'scores': list(names)})}", make)
        if not ranks.rank:
            ranks.reach("scored")
        return scores


def _score(name: str, of: TaskScores, samples: list[dict[str, Any]]) -> TaskScore:
    samples = sorted(samples, key=lambda sample: sample["doc_id"])
    for key, score in of.metrics.items():
        metric, _, kind = key.partition(",")
        if metric in ACCURACIES:
            error = score.standard_error
            return TaskScore(
                metric=key,
                version=of.version,
                value=100 * score.value,
                standard_error=None if error is None else 100 * error,
                samples=of.documents,
                of_each=[float(s[metric]) for s in samples if s["filter"] == (kind or "none")],
            )
    raise UserError(
        f"--tasks {name} reports no accuracy, only {', '.join(of.metrics)}: pass its texts as "
        "--data to measure a loss"
    )
