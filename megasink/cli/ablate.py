"""``megasink ablate``: what a model loses when heads are zeroed; its flags and their checks.

The rooms of interventions import torch, so only options that need them import them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.capture.head_names import head_problems, parse_head
from megasink.analysis.capture.ranks import taking_part
from megasink.analysis.loading import opened
from megasink.analysis.metrics.registry import score_names
from megasink.analysis.options import AblationOptions, ModelOptions
from megasink.attention import definitions
from megasink.checkpoints.find import is_run
from megasink.cli.analysis_flags import (
    add_sequence_flags,
    known_shape,
    model_parser,
    problems_of,
    settled,
)
from megasink.command_line import CommandParser
from megasink.errors import UserError, unknown_name

SCORES = ("awft", "ahon_ln")
"""Scores of a sweep by default: the paper's comparison."""
SEEDS = (1, 2, 3)
PERCENTS = tuple(float(f"{100 * share:g}") for share in definitions.SHARES)


def main(argv: Sequence[str] | None = None) -> int:
    """Zero heads that look inactive, and measure what the model loses.

    For each score and each percentage of --zeroed, heads beyond a threshold are zeroed in every
    sequence (P3.12), next to as many random ones. Writes ablation.json, ablation.csv, points.npz,
    figures and report.html. Every point is kept in OUTPUT/points: a killed sweep goes on, and the
    next one measures only what is new. torchrun shares the points.
    """
    with taking_part() as ranks:
        parser = ablate_parser(main.__doc__).first_screen(
            "megasink ablate path/to/model --data texts.jsonl --output ablation",
            *("--data", "--output", "--score", "--zeroed", "--heads", "--task", "--max-samples"),
            *("--seq-length", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which = check_ablate(args, is_run=is_run(args.model))
        tasks = None
        if args.task:  # before the model is loaded
            from megasink.analysis.evaluate.tasks_loading import load_tasks

            tasks = load_tasks(args.task, allow_download=args.allow_download)
        from megasink.analysis.ablate.run import ablate

        with opened(which, ranks) as model:
            ablate(model, AblationOptions.of(args), ranks, tasks)
    return 0


def ablate_parser(description: str | None) -> CommandParser:
    """Return the parser of `megasink ablate`."""
    parser = model_parser("megasink ablate", description)
    parser.add_argument(
        "--score",
        nargs="+",
        metavar="NAME",
        help="zero the heads that these scores mark, in each sequence "
        f"(default: {' '.join(SCORES)}, unless --heads, --interventions or --layer is given)",
    )
    percents = " ".join(f"{percent:g}" for percent in PERCENTS)
    parser.add_argument(
        "--zeroed",
        type=float,
        nargs="+",
        metavar="PERCENT",
        help=f"percentages of heads that each score zeroes (default: {percents})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help="of the random baseline (default: 1 2 3)",
    )
    parser.add_argument(
        "--task",
        "--tasks",
        nargs="+",
        metavar="NAME",
        help="tasks of lm-evaluation-harness in place of --data: accuracy in place of a loss",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="questions of each task (default: all)"
    )
    parser.add_argument(
        "--allow-download", action="store_true", help="fetch the data of tasks that is not cached"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="ANALYSIS",
        help="set the thresholds by the texts of this analysis (default: by --data or --task)",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        metavar="LAYER.HEAD",
        help="also zero these heads together, such as 3.5 7.2, or those of a .json or .csv file",
    )
    parser.add_argument(
        "--interventions", type=Path, metavar="FILE", help="also apply this file of interventions"
    )
    parser.add_argument(
        "--layer", type=int, metavar="L", help="also zero each head of this layer alone"
    )
    add_sequence_flags(parser)
    # Options of an analysis that do not apply.
    parser.set_defaults(inputs=["natural"], positions=1, columns=1, loss=False)
    parser.set_defaults(maps=None, map_length=2)
    return parser


def check_ablate(args: argparse.Namespace, *, is_run: bool) -> ModelOptions:
    """Check everything that needs no model, resolve the defaults, and return how it is loaded.

    Raises:
        ConfigError: one message with every problem.
    """
    if args.task and not args.data:
        args.inputs = []
    problems = problems_of(args, is_run=is_run)
    if args.task and args.data:
        problems.append("--task and --data: choose one")
    if args.limit is not None and not args.task:
        problems.append("--limit applies to --task: add it, or use --max-samples")
    elif args.limit is not None and args.limit < 1:
        problems.append(f"--limit {args.limit}: at least 1")
    others = (args.heads, args.interventions, args.layer)
    if args.score is None:
        args.score = list(SCORES) if all(other is None for other in others) else []
    else:
        problems += _of_scores(args.score)
    for flag, default in (("zeroed", list(PERCENTS)), ("seeds", list(SEEDS))):
        if getattr(args, flag) is None:
            setattr(args, flag, default)
        elif not args.score:
            problems.append(f"--{flag} applies to --score: add it, or leave --{flag} out")
    problems += [
        f"--zeroed {percent:g}: a percentage, 0 to 100"
        for percent in args.zeroed
        if not 0 <= percent <= 100
    ]
    for flag in ("score", "zeroed", "seeds"):
        values = getattr(args, flag)
        if len(set(values)) < len(values):
            problems.append(f"--{flag} {' '.join(map(str, values))}: a value is repeated")
    problems += _of_others(args, known_shape(args).heads)
    problems += _of_calibration(args)
    return settled(args, problems)


def _of_scores(names: Sequence[str]) -> list[str]:
    problems = []
    for name in names:
        if name == "random":
            problems.append("--score random: it is always measured, as the baseline: leave it out")
        elif name not in score_names():
            problems.append(unknown_name("--score", name, score_names()))
        elif name not in definitions.SCORES:  # a plugin's
            from megasink.analysis.interventions.scores import LayerScore

            try:
                LayerScore(name)
            except ValueError as error:
                problems.append(f"--score {name}: {error}")
    return problems


def _of_others(args: argparse.Namespace, model: Sequence[int] | None) -> list[str]:
    """Return the problems of --heads, --interventions and --layer.

    Args:
        model: number of heads in each of its layers, where its config.json tells.
    """
    problems = []
    if args.heads is not None:
        try:
            if len(args.heads) == 1 and Path(args.heads[0]).suffix in (".json", ".csv"):
                from megasink.analysis.interventions.heads import read_heads

                chosen = read_heads(Path(args.heads[0])).heads
            else:
                chosen = tuple(map(parse_head, args.heads))
            if model:
                problems += [f"--heads: {one}" for one in head_problems(chosen, model)]
        except (ValueError, UserError) as error:
            problems.append(f"--heads {error}")
    if args.interventions is not None:
        from megasink.analysis.interventions.record import read_interventions

        try:
            if not read_interventions(args.interventions):
                problems.append(f"--interventions {args.interventions}: the list is empty")
        except UserError as error:
            problems.append(f"--interventions {error}")
    if args.layer is not None and args.layer < 0:
        problems.append(f"--layer {args.layer}: layers are numbered from 0")
    elif args.layer is not None and model and args.layer >= len(model):
        problems.append(f"--layer {args.layer}: the layers are 0 to {len(model) - 1}")
    return problems


def _of_calibration(args: argparse.Namespace) -> list[str]:
    if args.calibration is None:
        return []
    if not args.score:
        return ["--calibration sets the thresholds of --score: add it"]
    if not (args.calibration / "results.json").is_file():
        return [f"--calibration: {args.calibration} holds no analysis: it has no results.json"]
    from megasink.analysis.ablate.calibration import read_calibration

    try:
        calibration = read_calibration(args.calibration)
    except UserError as error:
        return [f"--calibration: {error}"]
    return [
        f"--score {name}: the calibration {args.calibration} has no such score"
        for name in args.score
        if name not in calibration.scores
    ]
