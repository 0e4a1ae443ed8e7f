"""Replaced tokens in analyses: the options, and the default of a run (P2.15, P2.16)."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megasink.data.replaced_tokens import FORMS, Replacement, problems_of, replacement

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel

KEPT = "none"


def add_replacement_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options; see `replacement_for`."""
    parser.add_argument(
        "--replace-tokens-at",
        nargs="+",
        metavar="POSITION",
        help="replace the tokens at these positions of every sequence, from 0, BOS included; "
        f"{KEPT}: keep them (default: as the run was trained)",
    )
    parser.add_argument(
        "--replace-tokens-with",
        metavar="{random,ID}",
        help=f"by random tokens of the vocabulary, or the token with this id ({FORMS})",
    )


def replacement_problems(args: argparse.Namespace) -> list[str]:
    """Return the problems with the options, one message each."""
    at, value = args.replace_tokens_at, args.replace_tokens_with
    if at == [KEPT]:
        return [f"--replace-tokens-with {value} with --replace-tokens-at {KEPT}"] if value else []
    wrong = [word for word in at or [] if not word.removeprefix("-").isdecimal()]
    if wrong:
        return [f"--replace-tokens-at {' '.join(wrong)}: give positions from 0 on, or {KEPT} alone"]
    return problems_of(_positions(at), value)


def replacement_for(args: argparse.Namespace, model: "ProbedModel") -> Replacement | None:
    """Return what to replace in every sequence: by the options, or else as in the run's training.

    Sets `args.replaced_positions` and `args.replaced_with`, which results record, and says on
    stderr what a run's training decides.

    Raises:
        UserError: the vocabulary does not have the token.
    """
    value: str | None
    if args.replace_tokens_at is None:
        positions, value = list(model.replaced_at), model.replaced_with
    else:
        kept = args.replace_tokens_at == [KEPT]
        positions = [] if kept else _positions(args.replace_tokens_at)
        value = args.replace_tokens_with
    args.replaced_positions = args.replaced_with = None
    if not positions:
        return None
    args.replaced_positions, args.replaced_with = positions, value
    found = replacement(
        positions, value or "", seed=args.seed, tokenizer=model.tokenizer, size=model.vocabulary
    )
    if args.replace_tokens_at is None and os.environ.get("RANK", "0") == "0":
        print(
            f"megasink: as in its training, every sequence has {found.description} "
            f"(--replace-tokens-at {KEPT}: keep the text)",
            file=sys.stderr,
        )
    return found


def _positions(words: Sequence[str] | None) -> list[int]:
    return [int(word) for word in words or ()]
