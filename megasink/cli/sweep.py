"""``megasink sweep``: the same texts at several lengths and with several beginnings."""

import argparse
from collections.abc import Sequence

from megasink.analysis.open_model import opened
from megasink.analysis.options import BOS, ModelOptions, SweepOptions
from megasink.analysis.ranks import taking_part
from megasink.checkpoints.find import is_run
from megasink.cli import analysis_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model on the same texts by length, BOS and repeated first tokens.

    Every combination of --lengths, --bos and --first-token-copies is one row of sweep.csv: sink
    rates, inactive heads by fixed thresholds, massive activations, and the loss on the same tokens.
    Also writes report.html, sweep.json and sweep.npz; a killed sweep resumes.
    """
    with taking_part() as ranks:
        own = ("lengths", "first_token_copies", *analysis_flags.REPLACEMENT)
        parser = analysis_flags.model_parser("megasink sweep", main.__doc__, SweepOptions, *own)
        text = "auto follows the tokenizer (default: auto)"
        parser.add_argument("--bos", choices=BOS, nargs="+", default=["auto"], help=text)
        parser.first_screen(
            "megasink sweep path/to/model --data texts.jsonl --output sweep",
            *("--data", "--output", "--lengths", "--bos", "--first-token-copies"),
            *("--max-samples", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which, options = _check(args)
        analysis_flags.refuse_others("sweep", which, options)
        from megasink.analysis.run_sweep import sweep

        with opened(which, ranks) as model:
            sweep(model, options, ranks)
    return 0


def _check(args: argparse.Namespace) -> tuple[ModelOptions, SweepOptions]:
    """Check everything that needs no model, and return the measurement and its model."""
    options = SweepOptions.of(args, bos="none", beginnings=args.bos, positions=1)
    problems = analysis_flags.problems_of(args, options, is_run=is_run(args.model))
    for flag, values, least in (
        ("--lengths", options.lengths, 2),
        ("--first-token-copies", options.first_token_copies, 1),
    ):
        problems += [f"{flag} {value}: use {least} or more" for value in values if value < least]
        if len(set(values)) < len(values):
            problems.append(f"{flag} {' '.join(map(str, values))}: pass each value once")
    positions = analysis_flags.known_shape(args).positions
    problems += [
        f"--lengths {length}: use at most {positions}, the positions of the model"
        for length in options.lengths
        if positions is not None and length > positions
    ]
    return analysis_flags.settled(args, problems), options
