"""``megasink compare``: the curves of several runs in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.analysis.capture.options import add_overwrite
from megasink.analysis.pages.comparable import shortest_names
from megasink.analysis.pages.metrics import read_metrics
from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.json_output import add_json, as_text
from megasink.plugins import add_flag
from megasink.printable import wide_console


def main(argv: Sequence[str] | None = None) -> int:
    """Compare runs: their curves on one page, and a table of their final numbers."""
    parser = CommandParser(prog="megasink compare", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--x", choices=("step", "tokens"), default="step", help="horizontal axis")
    parser.add_argument("--smoothing", type=float, default=0.9, help="EMA factor, 0 to 1")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="PNG to write")
    add_overwrite(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    if not 0 <= args.smoothing < 1:
        raise UserError(f"--smoothing {args.smoothing}: use 0 or more, and less than 1")
    names = dict(zip(shortest_names(args.runs, "a run"), args.runs, strict=True))
    runs = {name: read_metrics(path) for name, path in names.items()}
    from rich.table import Table
    from rich.text import Text

    from megasink.analysis.pages.compare import COLUMNS, draw_comparison, summary
    from megasink.analysis.pages.style import comment_of

    of = [*(path.resolve() for path in args.runs), args.x, args.smoothing]
    line = f"compare {' '.join(names)} --x {args.x} --smoothing {args.smoothing:g}"
    comment = comment_of(args.output, line, of, overwrite=args.overwrite)
    draw_comparison(runs, args.output, x=args.x, factor=args.smoothing, comment=comment)
    if args.json:
        told: dict[str, Any] = {
            "runs": {
                name: {_key(column): value for column, value in summary(lines).items()}
                for name, lines in runs.items()
            },
            "picture": str(args.output),
        }
        print(as_text(told))
        return 0
    table = Table(box=None)
    table.add_column("run")
    for column in (*COLUMNS, "tokens/s"):
        table.add_column(column, justify="right")
    for name, lines in runs.items():
        row = summary(lines).items()
        table.add_row(Text(name), *("-" if v is None else _text(key, v) for key, v in row))
    wide_console().print(table)
    print(f"picture: {args.output}")
    return 0


def _key(column: str) -> str:
    """Return the name of a column of `summary` in JSON: that of the metric."""
    from megasink.analysis.pages.compare import COLUMNS

    return COLUMNS.get(column, "tokens_per_second")


def _text(key: str, value: float) -> str:
    return f"{value:,.0f}" if key in ("steps", "spikes", "tokens/s") else f"{value:.4f}"
