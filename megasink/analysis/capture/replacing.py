"""Replaced tokens in analyses: by the options, or else as in the run's training (P2.15, P2.16)."""

import os
import sys

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.options import KEPT, AnalysisOptions
from megasink.data.replaced_tokens import Replacement, replacement


def replacement_for(options: AnalysisOptions, model: ProbedModel) -> Replacement | None:
    """Return what to replace in every sequence, and say on stderr what a run's training decides.

    Raises:
        UserError: the vocabulary does not have the token.
    """
    requested, value = options.replace_tokens_at, options.replace_tokens_with
    if requested is None:
        positions, value = list(model.replaced_at), model.replaced_with
    else:
        positions = [] if requested == (KEPT,) else list(map(int, requested))
    if not positions:
        return None
    made = replacement(
        positions,
        value or "",
        seed=options.seed,
        tokenizer=model.tokenizer,
        size=model.vocabulary,
    )
    if requested is None and os.environ.get("RANK", "0") == "0":
        print(
            f"megasink: as in its training, every sequence has {made.description} "
            f"(--replace-tokens-at {KEPT}: keep the text)",
            file=sys.stderr,
        )
    return made
