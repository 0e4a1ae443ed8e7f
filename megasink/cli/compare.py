"""``megasink compare``: the curves of one run, or of several in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.analysis.pages.comparable import shortest_names
from megasink.analysis.pages.metrics import read_metrics
from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.json_output import add_json, as_text
from megasink.output_folder import add_overwrite
from megasink.plugins import add_flag
from megasink.printable import wide_console

Lines = list[dict[str, Any]]

SMOOTHING = 0.9


def main(argv: Sequence[str] | None = None) -> int:
    """Draw runs: the curves of one, or of several on one page, and a table of final numbers."""
    parser = CommandParser(prog="megasink compare", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--x", choices=("step", "tokens"), help="horizontal axis (default: step)")
    parser.add_argument(
        "--smoothing", type=float, help=f"EMA factor, 0 to 1 (default: {SMOOTHING})"
    )
    parser.add_argument(
        "--output", type=Path, help="PNG to write (default: compare.png; of one run RUN/curves.png)"
    )
    add_overwrite(parser)
    add_json(parser)
    args = parser.first_screen("megasink compare runs/sink runs/vanilla").parse_args(argv)
    if len(args.runs) == 1 and (args.x or args.smoothing is not None):
        raise UserError("--x and --smoothing are of several runs: give more of them, or neither")
    smoothing = SMOOTHING if args.smoothing is None else args.smoothing
    if not 0 <= smoothing < 1:
        raise UserError(f"--smoothing {smoothing}: use 0 or more, and less than 1")
    names = dict(zip(shortest_names(args.runs, "a run"), args.runs, strict=True))
    runs = {name: read_metrics(path) for name, path in names.items()}
    if len(runs) == 1:
        (lines,) = runs.values()
        picture = _draw_one(args.runs[0], lines, args.output, args.overwrite)
    else:
        picture = args.output or Path("compare.png")
        _draw_several(names, runs, picture, args.x or "step", smoothing, args.overwrite)
    if args.json:
        print(as_text({"runs": _of_runs(runs), "picture": str(picture)}))
    else:
        _show(runs)
        print(f"picture: {picture}")
    return 0


def _draw_one(run: Path, lines: Lines, output: Path | None, overwrite: bool) -> Path:
    from megasink.analysis.pages.curves import draw_run
    from megasink.analysis.pages.style import comment_of

    comment = None
    if output is not None:
        path = run.resolve()
        comment = comment_of(output, f"compare {path.name}", [path], overwrite=overwrite)
    return draw_run(run, output, lines, comment)


def _draw_several(
    names: dict[str, Path],
    runs: dict[str, Lines],
    output: Path,
    x: str,
    smoothing: float,
    overwrite: bool,
) -> None:
    from megasink.analysis.pages.compare import draw_comparison
    from megasink.analysis.pages.style import comment_of

    of = [*(path.resolve() for path in names.values()), x, smoothing]
    line = f"compare {' '.join(names)} --x {x} --smoothing {smoothing:g}"
    comment = comment_of(output, line, of, overwrite=overwrite)
    draw_comparison(runs, output, x=x, factor=smoothing, comment=comment)


def _of_runs(runs: dict[str, Lines]) -> dict[str, Any]:
    from megasink.analysis.pages.compare import summary

    return {
        name: {_key(column): value for column, value in summary(lines).items()}
        for name, lines in runs.items()
    }


def _show(runs: dict[str, Lines]) -> None:
    from rich.table import Table
    from rich.text import Text

    from megasink.analysis.pages.compare import COLUMNS, summary

    table = Table(box=None)
    table.add_column("run")
    for column in (*COLUMNS, "tokens/s"):
        table.add_column(column, justify="right")
    for name, lines in runs.items():
        row = summary(lines).items()
        table.add_row(Text(name), *("-" if v is None else _text(key, v) for key, v in row))
    wide_console().print(table)


def _key(column: str) -> str:
    """Return the name of a column of `summary` in JSON: that of the metric."""
    from megasink.analysis.pages.compare import COLUMNS

    return COLUMNS.get(column, "tokens_per_second")


def _text(key: str, value: float) -> str:
    return f"{value:,.0f}" if key in ("steps", "spikes", "tokens/s") else f"{value:.4f}"
