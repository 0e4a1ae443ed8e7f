"""Load the model that the options name, of either kind; torch is imported when one is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megasink.analysis.options import ModelOptions
from megasink.analysis.ranks import Ranks
from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.cpu.prepare_process import prepare_quietly

if TYPE_CHECKING:
    from megasink.analysis.capture.probe import ProbedModel


@contextmanager
def opened(which: ModelOptions, ranks: Ranks) -> "Iterator[ProbedModel]":
    """Load a model; of a run its newest checkpoint."""
    if not is_run(which.model):
        from megasink.analysis.capture.probed_models import of_transformers
        from megasink.transformers.load_hf_folder import load

        model, tokenizer = load(
            which.model,
            ranks.device(which.device),
            tokenizer=which.tokenizer,
            dtype=which.dtype,
            attn_implementation=which.attn_implementation,
            quiet=bool(ranks.rank),
        )
        yield of_transformers(model, tokenizer, which.shown_name)
        return
    find_checkpoint(which.model)  # before the slow imports
    prepare_quietly(cpu=which.device == "cpu")
    from megasink.checkpoints.load import single_process

    with single_process():
        yield open_checkpoint(which, None, ranks)


def open_checkpoint(which: ModelOptions, iteration: int | None, ranks: Ranks) -> "ProbedModel":
    """Load one checkpoint of a run, None for the latest."""
    from megasink.analysis.capture.probed_models import of_run
    from megasink.checkpoints.load import load_model

    ranks.device(which.device)
    loaded = load_model(which.model, iteration, which.tokenizer, yarn=which.yarn)
    return of_run(loaded, which.shown_name, yarn=which.yarn)
