"""``megasink compare``: the curves of one run, or of several in one figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from megasink.analysis.pages.comparison_checks import comment_of, shortest_names
from megasink.console.json_output import add_json, as_text
from megasink.console.stdout import wide_console
from megasink.errors import UserError
from megasink.figures.run_metrics import read_metrics
from megasink.files.output_folder import add_overwrite
from megasink.options.command_parser import CommandParser
from megasink.plugins import add_flag

Lines = list[dict[str, Any]]

SMOOTHING = 0.9
_PICTURE = Path("compare.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the curves of one or several runs on one page, with a table of final numbers."""
    parser = CommandParser(prog="megasink compare", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--x", choices=("step", "tokens"), help="horizontal axis (default: step)")
    parser.add_argument(
        "--smoothing", type=float, help=f"EMA factor, 0 to 1 (default: {SMOOTHING})"
    )
    text = "PNG to write (default: compare.png; for one run RUN/curves.png)"
    parser.add_argument("--output", type=Path, help=text)
    add_overwrite(parser)
    add_json(parser)
    args = parser.first_screen("megasink compare runs/sink runs/vanilla").parse_args(argv)
    if len(args.runs) == 1 and (args.x or args.smoothing is not None):
        raise UserError("--x and --smoothing need several runs: pass more, or drop the flags")
    smoothing = SMOOTHING if args.smoothing is None else args.smoothing
    if not 0 <= smoothing < 1:
        raise UserError(f"--smoothing {smoothing}: use 0 or more, and less than 1")
    names = dict(zip(shortest_names(args.runs, "a run"), args.runs, strict=True))
    runs = {name: read_metrics(path) for name, path in names.items()}
    x = args.x or "step"
    picture = args.output or (args.runs[0] / "curves.png" if len(runs) == 1 else _PICTURE)
    comment = None
    if args.output is not None or len(runs) > 1:
        line = f"compare {' '.join(names)}"
        of: list[object] = [path.resolve() for path in args.runs]
        if len(runs) > 1:
            line += f" --x {x} --smoothing {smoothing:g}"
            of += [x, smoothing]
        comment = comment_of(picture, line, of, overwrite=args.overwrite)
    from megasink.analysis.pages import comparison_page as page
    from megasink.figures.run_figure import figure_of

    if len(runs) == 1:
        figure = figure_of(args.runs[0], next(iter(runs.values())))
    else:
        figure = page.draw_comparison(runs, x=x, factor=smoothing)
    page.write_comparison(runs, figure, picture, comment=comment)
    if args.json:
        print(as_text({"runs": _of_runs(runs, page), "picture": str(picture)}))
    else:
        _show(page.final_numbers(runs))
        print(f"picture: {picture}, page: {picture.with_suffix('.html')}")
    return 0


def _of_runs(runs: dict[str, Lines], page: Any) -> dict[str, Any]:
    """Return the numbers of each run, by the names of the metrics."""
    names = page.COLUMNS | {"tokens/s": "tokens_per_second"}
    return {
        name: {names[column]: value for column, value in page.summary(lines).items()}
        for name, lines in runs.items()
    }


def _show(numbers: tuple[list[str], list[list[str]]]) -> None:
    (first, *columns), rows = numbers
    table = Table(first, box=None)
    for column in columns:
        table.add_column(column, justify="right")
    for name, *cells in rows:
        table.add_row(Text(name), *cells)
    wide_console().print(table)
