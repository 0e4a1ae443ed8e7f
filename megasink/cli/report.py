"""``megasink report``: one page for several analyses."""

from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.pages.comparison_checks import name_apart
from megasink.checkpoints.find import runs_in
from megasink.errors import ConfigError
from megasink.files.output_folder import add_overwrite, exclusive, results_in
from megasink.options.command_parser import CommandParser
from megasink.plugins import add_flag

_RESULTS = "results.json"
_NO_ANALYSIS = f"is not an analysis: it has no {_RESULTS}"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw one page for several analyses: shared figures, and distances between models."""
    parser = CommandParser(prog="megasink report", description=main.__doc__)
    add_flag(parser)
    parser.add_argument("analyses", type=Path, nargs="+", help="output folders of megasink analyze")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    add_overwrite(parser)
    parser.add_argument("--pdf", action="store_true", help="also save the figures as PDF")
    args = parser.first_screen("megasink report look/a look/b --output look/both").parse_args(argv)
    if problems := [
        f"{folder} {runs_in(folder, _RESULTS, 'analyses') or _NO_ANALYSIS}"
        for folder in args.analyses
        if not (folder / _RESULTS).is_file()
    ]:
        raise ConfigError(problems)
    kinds = ("png", "pdf") if args.pdf else ("png",)
    from megasink.analysis.analysis_folder import read_analysis
    from megasink.analysis.pages.analysis_page import write_report

    if args.analyses == [args.output]:
        # The page of an analysis, beside its numbers: read under the lock, so that no `megasink
        # analyze` can replace them meanwhile.
        with exclusive(args.output):
            write_report([read_analysis(args.output)], args.output, kinds=kinds)
    else:
        # Read before the output is touched: a failed page must not replace an older one.
        analyses = [read_analysis(folder) for folder in args.analyses]
        name_apart(analyses, args.analyses)
        about = {"analyses": [path.resolve() for path in args.analyses], "--pdf": args.pdf}
        with results_in(args.output, "report", about, overwrite=args.overwrite) as record:
            record()
            write_report(analyses, args.output, kinds=kinds)
    print(f"wrote {args.output}/report.html")
    return 0
