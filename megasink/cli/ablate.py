"""``megasink ablate``: measure the loss when heads are zeroed; flags and checks."""

import argparse
from collections.abc import Sequence

from megasink.analysis.heads import head_problems, heads_of
from megasink.analysis.metrics.registry import backward_names, score_names
from megasink.analysis.open_model import opened
from megasink.analysis.options import AblationOptions, ModelOptions
from megasink.analysis.ranks import taking_part
from megasink.attention import constants
from megasink.checkpoints.find import is_run
from megasink.cli import analysis_flags
from megasink.errors import UserError, unknown_name
from megasink.options.command_parser import CommandParser

SCORES = ("awft", "ahon_ln")
"""Default scores of a sweep: those that the paper compares."""
SEEDS = (1, 2, 3)
PERCENTS = tuple(float(f"{100 * share:g}") for share in constants.SHARES)


def main(argv: Sequence[str] | None = None) -> int:
    """Zero heads that look inactive, and measure the model's loss.

    For each score and each percentage of --zeroed, heads beyond a threshold are zeroed in every
    sequence (P3.12), and as a baseline, as many random heads. Writes ablation.json, ablation.csv,
    points.npz, figures and report.html. Every point is kept in OUTPUT/points: a killed sweep
    resumes, and a later one measures only new points. torchrun shares the points.
    """
    with taking_part() as ranks:
        parser = ablate_parser(main.__doc__).first_screen(
            "megasink ablate path/to/model --data texts.jsonl --output ablation",
            *("--data", "--output", "--score", "--zeroed", "--heads", "--tasks", "--max-samples"),
            *("--seq-length", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which, options = check_ablate(args, is_run=is_run(args.model))
        analysis_flags.refuse_others("ablate", which, options)
        tasks = None
        if options.tasks:  # before the model is loaded
            from megasink.analysis.evaluate.tasks_loading import load_tasks

            tasks = load_tasks(options.tasks, allow_download=args.allow_download)
        from megasink.analysis.ablate.run_ablation import ablate

        with opened(which, ranks) as model:
            ablate(model, options, ranks, tasks)
    return 0


def ablate_parser(description: str | None) -> CommandParser:
    """Return the parser of `megasink ablate`."""
    own = ("score", "zeroed", "seeds", "tasks", "limit", "calibration", "heads", "interventions")
    names, also = (*own, "layer", *analysis_flags.SEQUENCE), ", and task data that is not cached"
    return analysis_flags.model_parser(
        "megasink ablate", description, AblationOptions, *names, download=also
    )


def check_ablate(args: argparse.Namespace, *, is_run: bool) -> tuple[ModelOptions, AblationOptions]:
    """Check everything that needs no model, resolve the defaults, and return the settings."""
    others = (args.heads, args.interventions, args.layer)
    by_default = not args.score and all(other is None for other in others)
    options = AblationOptions.of(
        args,
        inputs=() if args.tasks and not args.data else ("natural",),
        score=SCORES if by_default else args.score,
        zeroed=args.zeroed or PERCENTS,
        seeds=args.seeds or SEEDS,
    )
    problems = analysis_flags.problems_of(args, options, is_run=is_run)
    if args.tasks and args.data:
        problems.append("--tasks and --data: choose one")
    if args.limit is not None and not args.tasks:
        problems.append("--limit applies only to --tasks: add --tasks, or use --max-samples")
    elif args.limit is not None and args.limit < 1:
        problems.append(f"--limit {args.limit}: use 1 or more")
    problems += _of_scores(args.score)
    if args.tasks and args.calibration is None:
        problems += [
            f"--by {name} needs the loss of texts, which --tasks does not measure: run megasink "
            f"analyze --metrics {name} and pass its folder as --calibration"
            for name in options.score
            if name in backward_names()
        ]
    problems += [
        f"--{flag} applies only to --score: add --score, or leave --{flag} out"
        for flag in ("zeroed", "seeds")
        if getattr(args, flag) and not options.score
    ]
    problems += [
        f"--zeroed {percent:g}: use a percentage from 0 to 100"
        for percent in options.zeroed
        if not 0 <= percent <= 100
    ]
    for flag in ("score", "zeroed", "seeds"):
        values = getattr(options, flag)
        if len(set(values)) < len(values):
            problems.append(f"--{flag} {' '.join(map(str, values))}: pass each value once")
    problems += _of_others(options, analysis_flags.known_shape(args).heads)
    problems += _of_calibration(options)
    return analysis_flags.settled(args, problems), options


def _of_scores(names: Sequence[str]) -> list[str]:
    problems = []
    for name in names:
        if name == "random":
            problems.append("--score random is always measured, as the baseline: leave it out")
        elif name not in score_names():
            problems.append(unknown_name("--score", name, score_names()))
        elif name not in constants.SCORES:  # a plugin's
            from megasink.analysis.interventions.dynamic_zeroing import LayerScore

            try:
                LayerScore(name)
            except ValueError as error:
                problems.append(f"--score {name}: {error}")
    return problems


def _of_others(options: AblationOptions, model: Sequence[int] | None) -> list[str]:
    """Return the problems of --heads, --interventions and --layer."""
    problems = []
    if options.heads is not None:
        try:
            chosen = heads_of(options.heads).heads
            problems += [f"--heads: {one}" for one in head_problems(chosen, model or ()) if model]
        except (ValueError, UserError) as error:
            problems.append(f"--heads {error}")
    if options.interventions is not None:
        from megasink.analysis.interventions.intervention_types import read_interventions

        try:
            if not read_interventions(options.interventions):
                problems.append(f"--interventions {options.interventions}: the list is empty")
        except UserError as error:
            problems.append(f"--interventions {error}")
    if options.layer is not None and options.layer < 0:
        problems.append(f"--layer {options.layer}: layers are numbered from 0")
    elif options.layer is not None and model and options.layer >= len(model):
        problems.append(f"--layer {options.layer}: the layers are 0 to {len(model) - 1}")
    return problems


def _of_calibration(options: AblationOptions) -> list[str]:
    if options.calibration is None:
        return []
    if not options.score:
        return ["--calibration needs --score, to set its thresholds: add --score"]
    if not (options.calibration / "results.json").is_file():
        where = f"--calibration: {options.calibration}"
        return [f"{where} is not an analysis: it has no results.json"]
    from megasink.analysis.ablate.settings import read_calibration

    try:
        calibration = read_calibration(options.calibration)
    except UserError as error:
        return [f"--calibration: {error}"]
    return [
        f"--score {name}: the calibration {options.calibration} has no such score"
        for name in options.score
        if name not in calibration
    ]
