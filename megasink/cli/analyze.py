"""``megasink analyze``: one pass over a Hugging Face or Megatron model."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megasink.analysis.capture import options
from megasink.analysis.capture.ranks import Ranks, taking_part
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.upstream.process import prepare_quietly

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    MODEL is a Hugging Face model folder, or a megasink run with checkpoints of any parallel layout;
    nothing is downloaded, and no code from the folder runs. Writes results.json, samples.npz,
    tables/*.csv, figures/*.png and report.html to the output folder. A killed analysis resumes when
    the same command runs again, and torchrun shares the samples among its processes.
    """
    with taking_part() as ranks:
        parser = options.parser(description=main.__doc__).first_screen(
            "megasink analyze path/to/model --data texts.jsonl --output look",
            *("--data", "--output", "--max-samples", "--seq-length", "--maps", "--inputs"),
            *("--name", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        is_ours = is_run(args.model)
        options.check(args, is_run=is_ours)
        from megasink.analysis.run import analyze

        measure_model(args, is_ours, ranks, analyze)
    return 0


def measure_model(
    args: argparse.Namespace,
    is_ours: bool,
    ranks: Ranks,
    measure: Callable[[argparse.Namespace, "ProbedModel", Ranks], Any],
) -> None:
    """Load the model that the command line names, of either kind, and measure it."""
    if not is_ours:
        from megasink.analysis.capture.cli import open_transformers

        measure(args, open_transformers(args, ranks), ranks)
        return
    find_checkpoint(args.model)  # before the slow imports
    prepare_quietly(cpu=args.device == "cpu")
    from megasink.checkpoints.load import single_process

    with single_process():
        measure(args, open_checkpoint(args, None, ranks), ranks)


def open_checkpoint(args: argparse.Namespace, iteration: int | None, ranks: Ranks) -> "ProbedModel":
    """Load one checkpoint of a run, None for the latest."""
    from megasink.analysis.capture.models import of_run
    from megasink.checkpoints.load import load_model

    ranks.device(args.device)
    loaded = load_model(args.model, iteration, args.tokenizer, yarn=args.yarn)
    return of_run(loaded, args.name or args.model.resolve().name, yarn=args.yarn)
