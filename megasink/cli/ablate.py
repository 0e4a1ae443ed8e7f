"""``megasink ablate``: what a model loses when heads are zeroed."""

from collections.abc import Sequence

from megasink.analysis.capture.ranks import taking_part
from megasink.analysis.options import AblationOptions
from megasink.checkpoints.find import is_run
from megasink.cli.ablate_options import ablate_parser, check_ablate
from megasink.cli.analyze import opened


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
