"""Scores of a probed model on lm-evaluation-harness's tasks, intervened or not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megasink.analysis.capture.head_changes import HeadChange
from megasink.analysis.capture.probe import Listener, ProbedModel
from megasink.analysis.evaluate.suites import Average, averages
from megasink.analysis.evaluate.tasks_loading import LoadedTasks, load_tasks, quiet
from megasink.analysis.interventions.intervention_types import Intervention, changes_of, to_entry
from megasink.analysis.result_store import write_results
from megasink.console.printable import printable
from megasink.errors import UserError
from megasink.files.checked_fields import to_json

BOOTSTRAPS = 1000
"""Number of resamples for standard errors that have no formula, such as those of perplexities."""
FORMAT = 1


@dataclass(frozen=True)
class Score:
    """The value of one metric on one task."""

    value: float
    standard_error: float | None  # None if lm-eval has none, as for a single document
    higher_is_better: bool | None  # None if the task does not say


@dataclass(frozen=True)
class TaskScores:
    """All metrics of one task, or of a group of tasks."""

    # Score by metric; with its filter after a comma where a task has several.
    metrics: dict[str, Score]
    documents: int  # evaluated
    shots: int | None  # examples before each question; None for a group
    version: str  # of the task's definition, in lm-eval
    of: list[str]  # the tasks of a group; empty for a task


@dataclass(frozen=True)
class TaskResults:
    """Scores by task."""

    tasks: dict[str, TaskScores]  # by name, groups included
    interventions: list[dict[str, Any]]  # as entries of an intervention file
    limit: int | None  # documents per task at most; None for all
    # Tokens without predecessors, because an intervention removed them, which therefore do not
    # count.
    unscored: int
    cut: int  # sequences longer than the model's positions, of which the beginning was cut
    lm_eval: str  # its version
    # Every document with its requests, answers and scores by task, if asked for.
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def evaluate(
    model: ProbedModel,
    interventions: Sequence[Intervention],
    tasks: Sequence[str] | LoadedTasks,
    *,
    limit: int | None = None,
    batch_size: int | str = "auto",
    num_fewshot: int | None = None,
    chat_template: bool = False,
    parse_special_tokens: bool = False,
    samples: bool = False,
    changes: Sequence[HeadChange] | None = None,
) -> TaskResults:
    """Score a model on tasks, by name or loaded, with interventions in every forward pass.

    Pass `changes`, the interventions' own, to read their counts. What a chat template renders is
    always parsed.
    """
    _check_model(model, chat_template=chat_template)
    if not isinstance(tasks, LoadedTasks):
        tasks = load_tasks(tasks, num_fewshot=num_fewshot)
    import lm_eval

    from megasink.analysis.evaluate.harness_model import HarnessModel

    if changes is None:
        changes = changes_of(interventions)
    parse = parse_special_tokens or chat_template
    with quiet(), model.open_probe(Listener(), changes) as probe:
        harness_model = HarnessModel(
            model, probe, interventions, batch_size, parse_special_tokens=parse
        )
        results: Any = lm_eval.evaluate(
            lm=harness_model,
            task_dict=tasks.loaded,
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=samples,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=chat_template,
            confirm_run_unsafe_code=tasks.runs_code,
        )
    return TaskResults(
        tasks={name: _scores(name, results) for name in results["results"]},
        interventions=[to_entry(intervention) for intervention in interventions],
        limit=limit,
        unscored=harness_model.unscored,
        cut=harness_model.cut,
        lm_eval=version("lm_eval"),
        samples=results.get("samples") or {},
    )


def _check_model(model: ProbedModel, *, chat_template: bool) -> None:
    config = getattr(model.module, "config", None)
    prefix = getattr(config, "prefix_lm_tokens", 0) or 0
    if prefix:
        raise UserError(
            f"the first {prefix} tokens of this model attend to each other (--prefix-lm-tokens), "
            "so the model would see the tokens that a task scores: evaluate a causal model"
        )
    if model.tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {model.tokenizer.name_or_path} has no end-of-text token, which "
            "lm-eval puts before texts: set eos_token in tokenizer_config.json"
        )
    if chat_template and not getattr(model.tokenizer, "chat_template", None):
        raise UserError(
            f"the tokenizer {model.tokenizer.name_or_path} has no chat template: evaluate without "
            "--chat-template"
        )


def _scores(name: str, results: dict[str, Any]) -> TaskScores:
    """Return one entry of lm-eval's results, whose keys are "metric,filter"."""
    entry, better = results["results"][name], results["higher_is_better"].get(name) or {}
    metrics = {}
    for key, value in entry.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = entry.get(f"{metric}_stderr,{kind}")
        metrics[metric if kind == "none" else key] = Score(
            value=float(value),
            standard_error=float(error) if isinstance(error, int | float) else None,
            higher_is_better=better.get(metric),
        )
    members = results["group_subtasks"].get(name, [])
    return TaskScores(
        metrics=metrics,
        documents=int(entry["sample_len"]),
        shots=None if members else results["n-shot"].get(name),
        version=str(results["versions"].get(name)),
        of=list(members),
    )


def write_evaluation(
    output: Path,
    results: TaskResults,
    model: ProbedModel,
    batch_size: int | str,
    named: Sequence[str] = (),
) -> None:
    """Write evaluation.json and, if there are any, the samples; print the table."""
    scores = {(t, m): s.value for t, of in results.tasks.items() for m, s in of.metrics.items()}
    found = averages(named, scores)
    about = {"format": FORMAT, "model": model.facts, "batch_size": batch_size, "averages": found}
    files: dict[str, Any] = {"evaluation.json": about | vars(results)}
    # Documents hold whatever a dataset holds, such as dates.
    for name, entries in files["evaluation.json"].pop("samples").items():
        lines = (json.dumps(to_json(entry), default=str) + "\n" for entry in entries)
        files[f"samples/{name.replace('/', '_')}.jsonl"] = "".join(lines)
    write_results(output, files, ["samples/*.jsonl"], kept=False)
    _show(results, found)
    print(f"wrote {output}/evaluation.json{', samples/' * bool(results.samples)}")


def _show(evaluation: TaskResults, averages: Mapping[str, Average]) -> None:
    table = Table("task", "shots", "n", "metric", "value", "± s.e.", box=None)
    for name, task in evaluation.tasks.items():
        shots = "" if task.shots is None else str(task.shots)
        facts = [printable(name), shots, str(task.documents)]
        for metric, score in task.metrics.items():
            error = "" if score.standard_error is None else f"± {score.standard_error:.4f}"
            better = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
            value = f"{score.value:.4f}" if abs(score.value) < 1e5 else f"{score.value:.4g}"
            table.add_row(*facts, f"{printable(metric)}{better}", value, error)
            facts = [""] * 3
    Console(markup=False).print(table)
    for row, average in averages.items():
        n = len(average.benchmarks)
        paper = "" if n == average.paper else f", {average.paper} in the paper"
        print(f"average of {row}, as in its paper: {average.value:.4f} ({n} benchmarks{paper})")
    print("n: documents; s.e.: standard error")
    if evaluation.limit is not None:
        print(
            f"Only the first {evaluation.limit} documents of each task: do not compare these "
            "scores with published ones."
        )
    if evaluation.unscored:
        print(f"{evaluation.unscored} tokens were not scored, because no token precedes them.")
    if evaluation.cut:
        print(
            f"{evaluation.cut} sequences exceeded the model's positions and were cut on the left."
        )
