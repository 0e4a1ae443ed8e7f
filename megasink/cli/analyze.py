"""``megasink analyze``: one pass over a model, or over each checkpoint of a run."""

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megasink.analysis.capture.ranks import Ranks, taking_part
from megasink.analysis.options import KINDS, AnalysisOptions, ModelOptions
from megasink.attention.definitions import MAP_TOKENS
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.checkpoints.intact import checkpoint_path, iterations
from megasink.cli import analysis_flags
from megasink.command_line import CommandParser
from megasink.output_folder import results_in
from megasink.printable import say_next
from megasink.upstream.process import prepare_quietly

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    MODEL is a Hugging Face model folder, or a megasink run with checkpoints of any parallel layout:
    its newest is measured, or with --checkpoints each of them, as curves against tokens. Nothing is
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
        which = check(args)
        options = AnalysisOptions.of(args)
        if args.checkpoints:
            _trace(which, options, ranks)
            return 0
        from megasink.analysis.run import analyze

        with opened(which, ranks) as model:
            analyze(model, options, ranks)
        if is_run(args.model) and ranks.rank == 0 and len(_steps(args.model)) > 1:
            output = f"{args.output}-checkpoints"
            say_next(
                "how it came to be so, checkpoint by checkpoint",
                *("analyze", args.model, "--checkpoints", "--data", *args.data, "--output", output),
            )
        if args.data and ranks.rank == 0:
            output = f"{args.output}-ablation"
            say_next(
                "what it loses without the heads that look inactive",
                *("ablate", args.model, "--data", *args.data, "--output", output),
            )
    return 0


def analyze_parser(prog: str, description: str | None = None) -> CommandParser:
    """Return a parser with the options of an analysis."""
    parser = analysis_flags.model_parser(prog, description)
    parser.add_argument(
        "--inputs",
        nargs="+",
        choices=KINDS,
        default=["natural"],
        help="the texts (natural), random tokens, one repeated token (default: natural)",
    )
    analysis_flags.add_sequence_flags(parser)
    parser.add_argument("--positions", type=int, default=64, help="tokens in curves (default: 64)")
    parser.add_argument("--columns", type=int, default=8, help="keys with a sink rate (default: 8)")
    parser.add_argument(
        "--maps",
        nargs="*",
        metavar="LAYER.HEAD",
        help="also draw attention maps and query-key geometry of these heads, such as 3.5 7.2; "
        "without a value, of the heads with the highest and lowest AWFT and importance",
    )
    parser.add_argument(
        "--map-length",
        type=int,
        default=48,
        help=f"tokens in a map, 2 to {MAP_TOKENS - 1} (default: 48)",
    )
    parser.add_argument("--no-loss", dest="loss", action="store_false", help="skip logits and loss")
    parser.add_argument(
        "--checkpoints",
        action="store_true",
        help="measure every checkpoint of a run, and draw all metrics against tokens",
    )
    return parser


def check(args: argparse.Namespace) -> ModelOptions:
    """Check everything that needs no model, and return how it is loaded.

    Raises:
        ConfigError: one message with every problem.
    """
    of_run = is_run(args.model)
    problems = analysis_flags.problems_of(args, is_run=of_run)
    if args.checkpoints and not of_run and args.model.is_dir():
        problems.append(f"--checkpoints is of a run, and {args.model} is none: remove it")
    return analysis_flags.settled(args, problems)


def _steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that a run has."""
    return iterations(find_checkpoint(run).folder.parent)


def _trace(which: ModelOptions, options: AnalysisOptions, ranks: Ranks) -> None:
    """Analyze every checkpoint that OUTPUT has no analysis of yet, and draw all over tokens."""
    output, steps = options.output, _steps(which.model)
    assert output is not None
    prepare_quietly(cpu=which.device == "cpu")
    from rich.console import Console

    from megasink.analysis.pages.trace import trace_row, write_trace
    from megasink.analysis.results_files import writing
    from megasink.analysis.run import analyze
    from megasink.checkpoints.load import single_process
    from megasink.progress import tracked

    # The analyses in OUTPUT compare their own settings.
    run = which.model.resolve()
    about = {"run": run, "--name": which.shown_name, "--data": options.data}
    console = Console(stderr=True, quiet=bool(ranks.rank))
    rows = []
    overwrite, first_rank = options.overwrite, not ranks.rank
    held = results_in(
        output, "analyze --checkpoints", about, overwrite=overwrite, writes=first_rank
    )
    with single_process(), held as record:
        # One line per checkpoint, as every analysis has its own progress bar.
        for step in tracked(steps, "trace", len(steps), "checkpoints", console=console, every=0):
            model = open_checkpoint(replace(which, name=f"step {step}"), step, ranks)
            own = replace(options, output=checkpoint_path(output, step))
            results = analyze(model, own, ranks, of_trace=True)
            del model
            if results is not None:
                rows.append(trace_row(results))
            gc.collect()
        if ranks.rank:
            return
        record()
        with writing(output):
            write_trace(rows, output, which.shown_name)
    print(f"wrote {output}/report.html and trace.csv from {len(rows)} analyses")
    say_next(
        "the page of one of them",
        *("report", checkpoint_path(output, steps[-1]), "--output", f"{output}-{steps[-1]}"),
    )


@contextmanager
def opened(which: ModelOptions, ranks: Ranks) -> "Iterator[ProbedModel]":
    """Load a model of either kind."""
    if not is_run(which.model):
        from megasink.analysis.capture.models import open_transformers

        yield open_transformers(which, ranks)
        return
    find_checkpoint(which.model)  # before the slow imports
    prepare_quietly(cpu=which.device == "cpu")
    from megasink.checkpoints.load import single_process

    with single_process():
        yield open_checkpoint(which, None, ranks)


def open_checkpoint(which: ModelOptions, iteration: int | None, ranks: Ranks) -> "ProbedModel":
    """Load one checkpoint of a run, None for the latest."""
    from megasink.analysis.capture.models import of_run
    from megasink.checkpoints.load import load_model

    ranks.device(which.device)
    loaded = load_model(which.model, iteration, which.tokenizer, yarn=which.yarn)
    return of_run(loaded, which.shown_name, yarn=which.yarn)
