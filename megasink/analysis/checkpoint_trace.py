"""`megasink analyze RUN --checkpoints`: an analysis of each checkpoint, and all against tokens."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megasink.analysis.metrics import Metric, metrics_shown
from megasink.analysis.open_model import open_checkpoint
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.analysis.pages import html
from megasink.analysis.pages.drawing import picture_of
from megasink.analysis.ranks import Ranks
from megasink.analysis.result_schemas import Results, scalars_of
from megasink.analysis.result_store import holding
from megasink.analysis.run_analysis import analyze
from megasink.checkpoints.damage import checkpoint_path, iterations
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.console.printable import say_next
from megasink.console.progress import tracked
from megasink.cpu.prepare_process import prepare_quietly
from megasink.errors import UserError
from megasink.figures.recorded_panels import curve
from megasink.figures.style import BLUE, even_panels, label, log_scale, styled, whole_numbers

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
Row = dict[str, Any]
"""A line of trace.csv: step, tokens, and scalar metric -> its number; None if not measured."""


def trace_row(results: Results) -> Row:
    """Return the step and tokens of a checkpoint, and its scalar metrics."""
    model = results.model
    if model.step is None or model.trained_tokens is None:
        raise UserError(
            f"the analysis of {model.name} has no training step: analyze a checkpoint of a run"
        )
    return {"step": model.step, "tokens": model.trained_tokens, **scalars_of(results)}


def write_trace(rows: Sequence[Row], output: Path, name: str) -> None:
    """Write trace.csv and report.html: every scalar metric by step (P2.11, P4.23)."""
    shown = metrics_shown("scalar")
    entries = {n: entry for n, entry in shown.items() if any(row[n] is not None for row in rows)}
    caption = "By number of training tokens. " + " ".join(
        f"{e.title}: {e.definition.rstrip('.')}{'' if e.axis == 'model' else f', {e.scalar}'} "
        f"({e.source})."
        for e in entries.values()
    )
    with styled():
        picture = picture_of(_draw(rows, entries), "trace", "Every metric over training", caption)
    cells = [
        [f"{row['step']:,}", f"{row['tokens']:,}", *(e.text(row[n]) for n, e in entries.items())]
        for row in rows
    ]
    first, last = rows[0], rows[-1]
    ends = (
        f"{entries[n].title} from {entries[n].text(first[n])} to {entries[n].text(last[n])}"
        for n in ("sink_rate", "imbalance", "circuit_stage")
        if n in entries
    )
    words = (
        f"{name}: {len(rows)} checkpoints, from step {first['step']:,} to {last['step']:,} "
        f"({last['tokens']:,} tokens): {'; '.join(ends)}."
    )
    head = ["step", "tokens", *(entry.title for entry in entries.values())]
    html.publish(
        output,
        "trace",
        model=name,
        heading="training trace",
        words=[words],
        pictures=[picture],
        after={"Checkpoints": [html.table(head, cells)]},
        files={"trace.csv": list(rows)},
    )


def _draw(rows: Sequence[Row], entries: Mapping[str, Metric]) -> Any:
    """Draw a panel per metric, against tokens."""
    figure, axes = even_panels(len(entries), 4, 2.8)
    highest = max(row["tokens"] for row in rows)
    size, unit = next(((n, f" ({letter})") for n, letter in _SCALES if highest >= n), (1.0, ""))
    tokens = [row["tokens"] / size for row in rows]
    for axis, (name, entry) in zip(axes, entries.items(), strict=True):
        numbers = [row[name] for row in rows]
        numbers = [entry.levels.index(n) if isinstance(n, str) else n for n in numbers]
        values = np.asarray(numbers, dtype=np.float64)  # None becomes NaN
        curve(axis, tokens, values, "o-", color=BLUE)
        ylabel = "" if entry.unit == "1" or entry.levels else entry.unit
        label(axis, entry.title, ylabel, f"tokens seen{unit}")
        if entry.levels:
            axis.set_yticks(range(len(entry.levels)), entry.levels)
            axis.set_ylim(-0.4, len(entry.levels) - 0.6)
        elif entry.unit in ("activation", "ratio"):
            log_scale(axis)
        elif entry.unit == "share":
            axis.set_ylim(-0.03, 1.03)
        elif entry.unit == "token":
            axis.set_ylim(-0.4, max(3.4, 0.4 + np.nanmax(values)))
            whole_numbers(axis.yaxis)
    return figure


def steps_of(run: Path) -> list[int]:
    """Return the steps of the checkpoints that a run has; none for a model of another kind."""
    if not is_run(run):
        return []
    return iterations(find_checkpoint(run).folder.parent)


def trace(which: ModelOptions, options: AnalysisOptions, ranks: Ranks) -> None:
    """Analyze every checkpoint without an analysis in OUTPUT, and draw all against tokens."""
    output, steps = options.output, steps_of(which.model)
    assert output is not None
    prepare_quietly(cpu=which.device == "cpu")
    from megasink.checkpoints.load import single_process

    # The analyses in OUTPUT compare their own settings.
    run = which.model.resolve()
    about = {"run": run, "--name": which.shown_name} | options.by_flag("data")
    console = Console(stderr=True, quiet=bool(ranks.rank))
    folders = {step: checkpoint_path(output, step) for step in steps}
    rows = []
    with single_process(), holding(options, "analyze --checkpoints", about, ranks) as record:
        # One line per checkpoint, as every analysis has its own progress bar.
        for step in tracked(steps, "trace", len(steps), "checkpoints", console=console, every=0):
            model = open_checkpoint(replace(which, name=f"step {step}"), step, ranks)
            own = replace(options, output=folders[step])
            analysis = analyze(model, own, ranks, of_trace=True)
            del model
            if analysis is not None:
                rows.append(trace_row(analysis.results))
            gc.collect()
        if ranks.rank:
            return
        record()
        write_trace(rows, output, which.shown_name)
    say_next(
        "draw the page of the last checkpoint",
        *("report", folders[steps[-1]], "--output", f"{output}-{steps[-1]}"),
    )
