"""``megasink analyze``: one pass over a model, or over each checkpoint of a run."""

import argparse
from collections.abc import Sequence

from megasink.analysis.metrics.registry import backward_names
from megasink.analysis.open_model import opened
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.analysis.ranks import taking_part
from megasink.checkpoints.find import is_run
from megasink.cli import analysis_flags
from megasink.console.printable import say_next
from megasink.errors import unknown_name
from megasink.options.command_parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    MODEL is a Hugging Face model folder, or a megasink run with checkpoints of any parallel layout:
    the newest is measured, or with --checkpoints all, drawn as curves against tokens. Nothing is
    downloaded, and no code from the folder runs. Writes results.json, samples.npz, tables/*.csv,
    figures/*.png and report.html to the output folder. A killed analysis resumes when the same
    command runs again, and torchrun shares the samples among its processes.
    """
    with taking_part() as ranks:
        parser = analyze_parser("megasink analyze", main.__doc__).first_screen(
            "megasink analyze path/to/model --data texts.jsonl --output look",
            *("--data", "--output", "--max-samples", "--seq-length", "--maps", "--inputs"),
            *("--checkpoints", "--name", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which, options = check(args)
        command = "analyze --checkpoints" if args.checkpoints else "analyze"
        analysis_flags.refuse_others(command, which, options)
        from megasink.analysis.checkpoint_trace import analyze, steps_of, trace

        if args.checkpoints:
            trace(which, options, ranks)
            return 0
        with opened(which, ranks) as model:
            analyze(model, options, ranks)
        if ranks.rank == 0 and len(steps_of(args.model)) > 1:
            output = f"{args.output}-checkpoints"
            say_next(
                "measure every checkpoint of the run",
                *("analyze", args.model, "--checkpoints", "--data", *args.data, "--output", output),
            )
        if args.data and ranks.rank == 0:
            output = f"{args.output}-ablation"
            most = ("--max-samples", args.max_samples) if args.max_samples else ()
            say_next(
                "measure its loss without the heads that look inactive",
                *("ablate", args.model, "--data", *args.data, *most, "--output", output),
            )
    return 0


def analyze_parser(prog: str, description: str | None = None) -> CommandParser:
    """Return a parser with the options of an analysis."""
    own = ("inputs", *analysis_flags.SEQUENCE, "positions", "columns", "maps", "map_length")
    parser = analysis_flags.model_parser(prog, description, AnalysisOptions, *own, "metrics")
    parser.add_argument("--no-loss", dest="loss", action="store_false", help="skip logits and loss")
    text = "measure every checkpoint of a run and plot all metrics against tokens"
    parser.add_argument("--checkpoints", action="store_true", help=text)
    return parser


def check(args: argparse.Namespace) -> tuple[ModelOptions, AnalysisOptions]:
    """Check everything that needs no model, and return the measurement and its model."""
    of_run, options = is_run(args.model), AnalysisOptions.of(args)
    problems = analysis_flags.problems_of(args, options, is_run=of_run)
    known = backward_names()
    problems += [unknown_name("--metrics", n, known) for n in options.metrics if n not in known]
    if args.checkpoints and not of_run and args.model.is_dir():
        problems.append(f"--checkpoints needs a run, but {args.model} is not a run: drop the flag")
    return analysis_flags.settled(args, problems), options
