"""``megasink plot``: the curves of one run."""

from collections.abc import Sequence
from pathlib import Path

from megasink.command_line import CommandParser
from megasink.plugins import add_flag
from megasink.report.metrics import read_metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Draw loss, head imbalance and head importance of a run."""
    parser = CommandParser(prog="megasink plot", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, help="PNG to write; default: RUN/curves.png")
    args = parser.parse_args(argv)
    lines = read_metrics(args.run)
    from megasink.report.curves import draw_run

    print(draw_run(args.run, args.output, lines))
    return 0
