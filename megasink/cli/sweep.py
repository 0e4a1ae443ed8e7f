"""``megasink sweep``: the same texts at several lengths and with several beginnings."""

import argparse
from collections.abc import Sequence

from megasink.analysis.capture.ranks import taking_part
from megasink.analysis.loading import opened
from megasink.analysis.options import BOS, ModelOptions, SweepOptions
from megasink.checkpoints.find import is_run
from megasink.cli.analysis_flags import (
    add_replacement_flags,
    known_shape,
    model_parser,
    problems_of,
    settled,
)
from megasink.command_line import CommandParser

COLUMNS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model on the same texts at several lengths, with and without BOS, and repeated.

    Every combination of --lengths, --bos and --first-token-copies is one row of sweep.csv: sink
    rates, inactive heads by fixed thresholds, massive activations, and the loss on the same tokens.
    Also writes report.html, sweep.json and sweep.npz; a killed sweep resumes.
    """
    with taking_part() as ranks:
        parser = _parser(main.__doc__).first_screen(
            "megasink sweep path/to/model --data texts.jsonl --output sweep",
            *("--data", "--output", "--lengths", "--bos", "--first-token-copies"),
            *("--max-samples", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which = _check(args)
        from megasink.analysis.sweep import sweep

        with opened(which, ranks) as model:
            sweep(model, SweepOptions.of(args, bos="none", beginnings=args.bos), ranks)
    return 0


def _parser(description: str | None) -> CommandParser:
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
    parser.set_defaults(maps=None, map_length=2, random_lengths=None)
    return parser


def _check(args: argparse.Namespace) -> ModelOptions:
    """Check everything that needs no model, and return how it is loaded.

    Raises:
        ConfigError: one message with every problem.
    """
    problems = problems_of(args, is_run=is_run(args.model))
    for flag, values, least in (
        ("--lengths", args.lengths, 2),
        ("--first-token-copies", args.first_token_copies, 1),
    ):
        problems += [f"{flag} {value}: at least {least}" for value in values if value < least]
        if len(set(values)) < len(values):
            problems.append(f"{flag} {' '.join(map(str, values))}: a value is repeated")
    positions = known_shape(args).positions
    problems += [
        f"--lengths {length}: the model has {positions} positions"
        for length in args.lengths
        if positions is not None and length > positions
    ]
    return settled(args, problems)
