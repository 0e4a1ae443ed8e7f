"""``megasink compare``: the curves of several runs in one figure."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.plugins import add_flag
from megasink.printable import printable
from megasink.report.compare import AXES, draw_comparison, summary
from megasink.report.curves import read_metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Compare runs: their curves on one page, and a table of their final numbers."""
    parser = CommandParser(prog="megasink compare", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--x", choices=AXES, default="step", help="horizontal axis")
    parser.add_argument("--smoothing", type=float, default=0.9, help="EMA factor, 0 to 1")
    parser.add_argument("--output", type=Path, default=Path("compare.png"), help="PNG to write")
    args = parser.parse_args(argv)
    if not 0 <= args.smoothing < 1:
        raise UserError(f"--smoothing {args.smoothing}: use 0 or more, and less than 1")
    runs = {name: read_metrics(path) for name, path in _names(args.runs).items()}
    draw_comparison(runs, args.output, x=args.x, factor=args.smoothing)
    table = Table(box=None)
    table.add_column("run")
    rows = {name: summary(lines) for name, lines in runs.items()}
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = ["-" if value is None else _text(key, value) for key, value in row.items()]
        table.add_row(Text(name), *cells)
    Console().print(table)
    print(f"picture: {args.output}")
    return 0


def _text(key: str, value: float) -> str:
    return f"{value:,.0f}" if key in ("steps", "spikes", "tokens/s") else f"{value:.4f}"


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the shortest path suffixes that tell the runs apart."""
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise UserError("a run is given twice: give each once")
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            break
    return dict(zip(map(printable, names), paths, strict=True))
