"""The options of `megasink sweep`, and their checks."""

import argparse

from megasink.analysis.capture.options import BOS, model_parser, problems_of, settle
from megasink.analysis.capture.replacing import add_replacement_flags
from megasink.command_line import CommandParser

COLUMNS = 8


def sweep_parser(description: str | None) -> CommandParser:
    """Return the parser of `megasink sweep`."""
    parser = model_parser("megasink sweep", description)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[64],
        metavar="T",
        help="text lengths in tokens; texts shorter than the longest are left out (default: 64)",
    )
    parser.add_argument(
        "--bos",
        choices=BOS,
        nargs="+",
        default=["auto"],
        help="auto follows the tokenizer (default: auto)",
    )
    parser.add_argument(
        "--first-token-copies",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="copies of BOS or, without BOS, of the first token of the text (default: 1)",
    )
    add_replacement_flags(parser)
    # Options of an analysis that a sweep sets itself.
    parser.set_defaults(inputs=["natural"], seq_length=2, positions=1, columns=COLUMNS, loss=True)
    parser.set_defaults(maps=None, map_length=2)
    return parser


def check_sweep(args: argparse.Namespace, *, is_run: bool) -> None:
    """Check everything that needs no model.

    Raises:
        ConfigError: one message with every problem.
    """
    problems = problems_of(args, is_run=is_run)
    for flag, values, least in (
        ("--lengths", args.lengths, 2),
        ("--first-token-copies", args.first_token_copies, 1),
    ):
        problems += [f"{flag} {value}: at least {least}" for value in values if value < least]
        if len(set(values)) < len(values):
            problems.append(f"{flag} {' '.join(map(str, values))}: a value is repeated")
    settle(args, problems)
