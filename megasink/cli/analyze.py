"""``megasink analyze``: one pass over a Hugging Face or Megatron model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megasink.analysis.capture.ranks import Ranks, taking_part
from megasink.analysis.options import AnalysisOptions, ModelOptions
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.cli import analysis_flags
from megasink.printable import say_next
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
        parser = analysis_flags.parser(description=main.__doc__).first_screen(
            "megasink analyze path/to/model --data texts.jsonl --output look",
            *("--data", "--output", "--max-samples", "--seq-length", "--maps", "--inputs"),
            *("--name", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which = analysis_flags.check(args, is_run=is_run(args.model))
        from megasink.analysis.run import analyze

        with opened(which, ranks) as model:
            analyze(model, AnalysisOptions.of(args), ranks)
        if args.data and ranks.rank == 0:
            output = f"{args.output}-ablation"
            say_next(
                "what it loses without the heads that look inactive",
                *("ablate", args.model, "--data", *args.data, "--output", output),
            )
    return 0


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
