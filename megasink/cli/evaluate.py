"""``megasink evaluate``: scores on lm-evaluation-harness's tasks, with interventions or without."""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megasink.analysis.evaluate.suites import ALL
from megasink.analysis.evaluate.tasks_loading import load_tasks
from megasink.analysis.open_model import opened
from megasink.analysis.options import ModelOptions
from megasink.analysis.ranks import taking_part
from megasink.checkpoints.find import is_run
from megasink.cli.analysis_flags import settled, weights_parser, weights_problems
from megasink.files.output_folder import refuse_others, results_in
from megasink.options.command_parser import CommandParser
from megasink.options.dataclass_flags import flag_of


def main(argv: Sequence[str] | None = None) -> int:
    """Score a model on tasks of lm-evaluation-harness, with interventions or without.

    MODEL is a Hugging Face model folder, or a megasink run with checkpoints of any parallel layout.
    Prints scores with their standard errors and writes evaluation.json. Needs the extra "eval".
    Datasets are read from their cache (HF_DATASETS_CACHE, HF_HOME); docstrings_choice and
    docstrings_perplexity ship with megasink.
    """
    with taking_part() as ranks:
        parser = _parser(main.__doc__).first_screen(
            "megasink evaluate path/to/model --tasks docstrings_choice --output scores",
            *("--tasks", "--output", "--interventions", "--limit", "--num-fewshot"),
            *("--allow-download", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        which, interventions = _check(args, is_run=is_run(args.model))
        names = ("limit", "batch_size", "chat_template", "parse_special_tokens", "samples")
        options = {name: getattr(args, name) for name in names}
        given = options | {"--tasks": args.tasks, "--num-fewshot": args.num_fewshot}
        given |= {"--task-folder": args.task_folder, "--interventions": []}
        if interventions:
            from megasink.analysis.interventions.intervention_types import to_entry

            given["--interventions"] = [to_entry(one) for one in interventions]
        shown = {flag_of(name.removeprefix("--")): value for name, value in given.items()}
        shown |= {"--name": which.shown_name}
        if not args.overwrite:
            refuse_others(args.output, "evaluate", shown)

        own = args.model / "tokenizer"  # of a run
        tasks = load_tasks(
            args.tasks,
            folders=args.task_folder,
            num_fewshot=args.num_fewshot,
            tokenizer=args.tokenizer or (own if own.is_dir() else args.model),
            allow_download=args.allow_download,
            run_generated_code=args.confirm_run_unsafe_code,
        )
        from megasink.analysis.capture.probed_models import identity
        from megasink.analysis.evaluate.harness import evaluate, write_evaluation

        with opened(which, ranks) as model:
            about = identity(model, f"lm-eval {version('lm_eval')}", generation=model.generation)
            about |= model.facts | given
            folder = (args.output, "evaluate", about)
            with results_in(*folder, given=shown, overwrite=args.overwrite) as record:
                results = evaluate(model, interventions, tasks, **options)
                record()
                write_evaluation(args.output, results, model, args.batch_size, args.tasks)
    return 0


def _parser(description: str | None) -> CommandParser:
    also = ", missing datasets, and metrics (code from the hub)"
    parser = weights_parser("megasink evaluate", description, also)
    suites = ", ".join(f"{suite.row} ({suite.name})" for suite in ALL)
    text = f"tasks, groups and tags of lm-eval, or the papers' suites: {suites}"
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help=text)
    text = "JSON list of interventions, applied in order (docs/interventions.md)"
    parser.add_argument("--interventions", type=Path, metavar="FILE", help=text)
    parser.add_argument("--limit", type=int, help="documents per task (default: all)")
    parser.add_argument(
        "--num-fewshot", type=int, help="examples before each question (default: the task's)"
    )
    text = "sequences per batch, or auto: as many as fit (default: auto)"
    parser.add_argument("--batch-size", type=_batch_size, default="auto", metavar="N", help=text)
    parser.add_argument(
        "--chat-template", action="store_true", help="use the tokenizer's chat template"
    )
    text = "also write the requests and answers of each document to samples/TASK.jsonl"
    parser.add_argument("--samples", action="store_true", help=text)
    text = "more tasks (lm-eval YAML files, which may run Python files that they name)"
    parser.add_argument(
        "--task-folder", type=Path, nargs="+", default=[], metavar="FOLDER", help=text
    )
    text = "allow tasks that run code written by the model, such as humaneval"
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help=text)
    return parser


def _batch_size(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def _check(args: argparse.Namespace, *, is_run: bool) -> tuple[ModelOptions, list[Any]]:
    """Check everything that needs neither lm-eval nor the model."""
    problems = weights_problems(args, is_run=is_run)
    for flag, least in (("limit", 1), ("num_fewshot", 0), ("batch_size", 1)):
        value = getattr(args, flag)
        if isinstance(value, int) and value < least:
            problems.append(f"--{flag.replace('_', '-')} {value}: use {least} or more")
    problems += [
        f"--task-folder {folder} is not a folder"
        for folder in args.task_folder
        if not folder.is_dir()
    ]
    if args.interventions is not None and not args.interventions.is_file():
        problems.append(f"--interventions {args.interventions}: no such file")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append("megasink evaluate runs in one process: start it without torchrun")
    which = settled(args, problems)
    if args.interventions is None:
        return which, []
    from megasink.analysis.interventions.intervention_types import read_interventions

    return which, list(read_interventions(args.interventions))
