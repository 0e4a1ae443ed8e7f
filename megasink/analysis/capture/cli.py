"""Load a Hugging Face model folder for probing."""

import argparse

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.models import of_transformers
from megasink.analysis.capture.ranks import Ranks


def open_transformers(args: argparse.Namespace, ranks: Ranks) -> ProbedModel:
    """Load the Hugging Face model folder that the command line names.

    Raises:
        ConfigError: megasink cannot read its attention.
        UserError: see `load`.
    """
    from megasink.analysis.capture.load import load

    model, tokenizer = load(args, ranks.device(args.device), quiet=bool(ranks.rank))
    return of_transformers(model, tokenizer, args.name or args.model.resolve().name)
