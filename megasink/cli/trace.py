"""`megasink trace`: analyses of a run's checkpoints."""

import argparse
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megasink.analysis.capture.ranks import Ranks, taking_part
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.analysis.results import Results
from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.intact import checkpoint_path, iterations
from megasink.cli import analysis_flags
from megasink.cli.analyze import open_checkpoint
from megasink.output_folder import results_in
from megasink.upstream.process import prepare_quietly


def main(argv: Sequence[str] | None = None) -> int:
    """Trace sinks, head imbalance, norms and the circuit's stage over a run.

    Every checkpoint is analyzed unless OUTPUT already holds its analysis. Writes report.html,
    trace.csv and trace.png; `megasink report` draws the analysis of one checkpoint.
    """
    with taking_part() as ranks:
        parser = analysis_flags.parser("megasink trace", main.__doc__).first_screen(
            "megasink trace runs/mine --data texts.jsonl --output trace",
            *("--data", "--output", "--max-samples", "--seq-length", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        name = args.name or args.model.resolve().name
        about = {"run": args.model.resolve(), "--name": name, "--data": args.data}
        which = analysis_flags.check(args, is_run=True)
        newest = find_checkpoint(args.model)
        steps = sorted(iterations(newest.folder.parent))
        prepare_quietly(cpu=which.device == "cpu")
        from megasink.analysis.pages.trace import trace_row, write_trace
        from megasink.analysis.results_files import writing
        from megasink.checkpoints.load import single_process

        with single_process(), _holding(args, about, ranks) as record:
            analyses = _analyze_all(which, AnalysisOptions.of(args), steps, ranks)
            if ranks.rank == 0:
                record()
                with writing(args.output):
                    write_trace([trace_row(of) for of in analyses], args.output, name)
                print(
                    f"wrote {args.output}/report.html, trace.csv and trace.png from "
                    f"{len(analyses)} analyses"
                )
    return 0


def _holding(args: argparse.Namespace, about: dict[str, Any], ranks: Ranks) -> Any:
    """Hold OUTPUT; the analyses in it, one for each checkpoint, compare their own settings."""
    writes = not ranks.rank
    return results_in(args.output, "trace", about, overwrite=args.overwrite, writes=writes)


def _analyze_all(
    which: ModelOptions, options: AnalysisOptions, steps: list[int], ranks: Ranks
) -> list[Results]:
    from rich.console import Console

    from megasink.analysis.run import analyze
    from megasink.progress import tracked

    assert options.output is not None
    analyses: list[Results] = []
    console = Console(stderr=True, quiet=bool(ranks.rank))
    # One line per checkpoint, as every analysis has its own progress bar.
    for step in tracked(steps, "trace", len(steps), "checkpoints", console=console, every=0):
        model = open_checkpoint(replace(which, name=f"step {step}"), step, ranks)
        own = replace(options, output=checkpoint_path(options.output, step))
        result = analyze(model, own, ranks, of_trace=True)
        del model
        if result is not None:
            analyses.append(result)
        gc.collect()
    return analyses
