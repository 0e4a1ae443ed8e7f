"""`megasink analyze RUN --checkpoints`: an analysis of each checkpoint, and all against tokens."""

import gc
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.loading import open_checkpoint
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.analysis.pages.trace import trace_row, write_trace
from megasink.analysis.run import analyze
from megasink.analysis.store import holding
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.checkpoints.intact import checkpoint_path, iterations
from megasink.console.printable import say_next
from megasink.console.progress import tracked
from megasink.cpu.process import prepare_quietly


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
        "the page of one of them",
        *("report", folders[steps[-1]], "--output", f"{output}-{steps[-1]}"),
    )
