"""`megasink trace`: analyses of a run's checkpoints, or those made during its training."""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasink.analysis.capture.ranks import Ranks, taking_part
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.analysis.results import Results
from megasink.checkpoints.find import find_checkpoint
from megasink.checkpoints.intact import checkpoint_path, iterations
from megasink.cli import analysis_flags
from megasink.cli.analyze import open_checkpoint
from megasink.output_folder import results_in
from megasink.training.run_dir import LIVE
from megasink.upstream.process import prepare_quietly


def main(argv: Sequence[str] | None = None) -> int:
    """Trace sinks, head imbalance, norms and the circuit's stage over a run.

    With --data, every checkpoint is analyzed unless OUTPUT already holds its analysis; without it,
    the analyses made during training (--analyze-interval) are used. Writes report.html, trace.csv
    and trace.png.
    """
    with taking_part() as ranks:
        parser = analysis_flags.parser("megasink trace", main.__doc__).first_screen(
            "megasink trace runs/mine --data texts.jsonl --output trace",
            *("--data", "--output", "--max-samples", "--seq-length", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        made = _made_in_training(args.model)
        name = args.name or args.model.resolve().name
        about = {"run": args.model.resolve(), "--name": name, "--data": args.data}
        if made and not args.data and args.inputs == ["natural"]:
            if ranks.rank == 0:
                from megasink.analysis.folder import read_analysis

                results = [read_analysis(folder).results for folder in made]
                with _holding(args, about, ranks) as record:
                    record()
                    _write(args.output, results, name)
            return 0
        which = analysis_flags.check(args, is_run=True)
        newest = find_checkpoint(args.model)
        steps = sorted(iterations(newest.folder.parent))
        prepare_quietly(cpu=which.device == "cpu")
        from megasink.checkpoints.load import single_process

        with single_process(), _holding(args, about, ranks) as record:
            analyses = _analyze_all(which, AnalysisOptions.of(args), steps, ranks)
            if ranks.rank == 0:
                links = [f"{checkpoint_path(Path(), step)}/report.html" for step in steps]
                record()
                _write(args.output, analyses, name, links)
    return 0


def _holding(args: argparse.Namespace, about: dict[str, Any], ranks: Ranks) -> Any:
    """Hold OUTPUT; the analyses in it, one for each checkpoint, compare their own settings."""
    writes = not ranks.rank
    return results_in(args.output, "trace", about, overwrite=args.overwrite, writes=writes)


def _made_in_training(run: Path) -> list[Path]:
    """Return the finished analyses that a run made during training, by step."""
    folder = run / LIVE
    made = [checkpoint_path(folder, step) for step in iterations(folder)]
    return [path for path in made if (path / "results.json").is_file()]


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
        result = analyze(model, own, ranks, again=False)
        del model
        if result is not None:
            analyses.append(result)
        gc.collect()
    return analyses


def _write(root: Path, analyses: Sequence[Results], name: str, links: Sequence[str] = ()) -> None:
    """Write trace.csv, trace.png and report.html."""
    from megasink.analysis.pages.trace import trace_row, write_trace
    from megasink.analysis.results_files import writing

    different = {results.run.data_sha256 for results in analyses}
    with writing(root):
        write_trace([trace_row(results) for results in analyses], root, name, links)
    if len(different) > 1:
        print(
            f"megasink: warning: the analyses use {len(different)} different sets of samples "
            "(run.data_sha256): compare only steps with the same set",
            file=sys.stderr,
        )
    print(f"wrote {root}/report.html, trace.csv and trace.png from {len(analyses)} analyses")
