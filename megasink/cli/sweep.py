"""``megasink sweep``: the same texts at several lengths and with several beginnings."""

from collections.abc import Sequence

from megasink.analysis.capture.ranks import taking_part
from megasink.analysis.sweep_options import check_sweep, sweep_parser
from megasink.checkpoints.find import is_run
from megasink.cli.analyze import measure_model


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model on the same texts at several lengths, with and without BOS, and repeated.

    Every combination of --lengths, --bos and --first-token-copies is one row of sweep.csv: sink
    rates, inactive heads by fixed thresholds, massive activations, and the loss on the same tokens.
    Also writes sweep.json, sweep.npz and sweep.png; a killed sweep resumes.
    """
    with taking_part() as ranks:
        parser = sweep_parser(main.__doc__).first_screen(
            "megasink sweep path/to/model --data texts.jsonl --output sweep",
            *("--data", "--output", "--lengths", "--bos", "--first-token-copies"),
            *("--max-samples", "--device", "--overwrite"),
        )
        args = parser.parse_args(argv)
        is_ours = is_run(args.model)
        check_sweep(args, is_run=is_ours)
        from megasink.analysis.sweep import sweep

        measure_model(args, is_ours, ranks, sweep)
    return 0
