"""Write an evaluation: scores as JSON, samples as JSON lines, a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.evaluate.harness import TaskResults, TaskScores
from megasink.analysis.evaluate.suites import Average, averages
from megasink.analysis.store import write_results
from megasink.console.printable import printable
from megasink.files.checked_fields import to_json

FORMAT = 1


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on tasks of lm-evaluation-harness."""

    format: int
    model: dict[str, Any]  # name, kind, attention, dtype, and how far it was trained, where known
    # tasks, interventions, limit, unscored, cut, lm_eval: see `TaskResults`.
    tasks: dict[str, TaskScores]
    interventions: list[dict[str, Any]]
    limit: int | None
    batch_size: Any  # as asked for, a number or "auto"
    unscored: int
    cut: int
    lm_eval: str
    # Of the papers' suites that were named, by row.
    averages: dict[str, Average] = field(default_factory=dict)


def write_evaluation(
    output: Path,
    results: TaskResults,
    model: ProbedModel,
    batch_size: int | str,
    named: Sequence[str] = (),
) -> None:
    """Write evaluation.json and, if there are any, the samples; print the table."""
    shared = {name: getattr(results, name) for name in TaskResults.__dataclass_fields__}
    del shared["samples"]
    scores = {(t, m): s.value for t, of in results.tasks.items() for m, s in of.metrics.items()}
    evaluation = Evaluation(
        format=FORMAT,
        model=model.facts,
        batch_size=batch_size,
        averages=averages(named, scores),
        **shared,
    )
    # Documents hold whatever a dataset holds, such as dates.
    files: dict[str, Any] = {
        f"samples/{name.replace('/', '_')}.jsonl": "".join(
            json.dumps(to_json(entry), default=str) + "\n" for entry in entries
        )
        for name, entries in results.samples.items()
    }
    files |= {"evaluation.json": evaluation}
    write_results(output, files, ["samples/*.jsonl"], kept=False)
    _show(evaluation)
    print(f"wrote {output}/evaluation.json{', samples/' * bool(results.samples)}")


def _show(evaluation: Evaluation) -> None:
    table = Table("task", "shots", "n", "metric", "value", "± s.e.", box=None)
    for name, task in evaluation.tasks.items():
        first = True
        for metric, score in task.metrics.items():
            error = "" if score.standard_error is None else f"± {score.standard_error:.4f}"
            better = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
            facts = (name, "" if task.shots is None else str(task.shots), str(task.documents))
            table.add_row(
                *(map(printable, facts) if first else ("", "", "")),
                f"{printable(metric)}{better}",
                f"{score.value:.4f}" if abs(score.value) < 1e5 else f"{score.value:.4g}",
                error,
            )
            first = False
    Console(markup=False).print(table)
    for row, average in evaluation.averages.items():
        paper = (
            "" if (n := len(average.benchmarks)) == average.paper else f", {average.paper} there"
        )
        print(f"average of {row}, as in its paper: {average.value:.4f} ({n} benchmarks{paper})")
    print("n: documents; s.e.: standard error")
    if evaluation.limit is not None:
        print(
            f"Only the first {evaluation.limit} documents of each task: do not compare these "
            "scores with published ones."
        )
    if evaluation.unscored:
        print(f"{evaluation.unscored} tokens without any token before them were not scored.")
    if evaluation.cut:
        print(
            f"{evaluation.cut} sequences were longer than the model's positions: cut on the left."
        )
