"""``megasink plot``: the curves of one run."""

from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.capture.options import add_overwrite
from megasink.analysis.pages.metrics import read_metrics
from megasink.command_line import CommandParser
from megasink.plugins import add_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Draw loss, head imbalance and head importance of a run."""
    parser = CommandParser(prog="megasink plot", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, help="PNG to write; default: RUN/curves.png")
    add_overwrite(parser)
    args = parser.parse_args(argv)
    lines = read_metrics(args.run)
    from megasink.analysis.pages.curves import draw_run
    from megasink.analysis.pages.style import comment_of

    comment = None
    if args.output is not None:
        run = args.run.resolve()
        comment = comment_of(args.output, f"plot {run.name}", [run], overwrite=args.overwrite)
    print(draw_run(args.run, args.output, lines, comment))
    return 0
