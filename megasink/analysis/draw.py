"""Write an analysis: numbers first, then the page, figures and tables, also of several analyses."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.analysis import Analysis
from megasink.analysis.folder import Arrays, tables_of
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.analysis_figures import figures
from megasink.analysis.pages.analysis_page import in_words, page
from megasink.analysis.pages.comparable import differences
from megasink.analysis.pages.drawing import page_files
from megasink.analysis.store import PAGE_FILES, write_results
from megasink.console.printable import printable, say


def write_report(
    analyses: Sequence[Analysis],
    output: Path,
    *,
    kinds: Sequence[str] = ("png",),
    kept: bool = False,
) -> None:
    """Write the page and figures (png, pdf) of analyses; of a single one tables too."""
    for difference in differences(analyses):
        print(f"megasink: warning: the analyses have {difference}", file=sys.stderr)
    for analysis in analyses:
        if unknown := sorted(analysis.results.metrics.keys() - metrics().keys()):
            print(
                f"megasink: warning: {analysis.name} has metrics that are not registered here: "
                f"{', '.join(unknown)}; load the module that defines them (--plugin) to see them",
                file=sys.stderr,
            )
    pictures = figures(analyses, kinds)
    files = page_files(page(analyses, pictures), pictures)
    if len(analyses) == 1:
        files |= {f"tables/{name}.csv": rows for name, rows in tables_of(analyses[0]).items()}
    write_results(output, files, (*PAGE_FILES, "tables/*.csv"), kept=kept)


def write_own_page(output: Path, analysis: Analysis) -> None:
    """Write the page, figures and tables of an analysis, and print its summary."""
    write_report([analysis], output, kept=True)
    for line in in_words(analysis):
        say(line)
    for entry in analysis.results.non_finite:
        print(
            f"megasink: warning: {printable(entry.source)} has infinite or NaN values in layers "
            f"{entry.layers}, heads {entry.heads}: these values are left out of every average",
            file=sys.stderr,
        )
    print(f"wrote {output}/report.html, results.json, *.npz, tables/, figures/")


def write_numbers(output: Path, analysis: Analysis, samples: Arrays) -> None:
    """Write results.json and the arrays; `megasink report` creates the rest."""
    arrays = {"samples.npz": samples, "geometry.npz": analysis.points, "maps.npz": analysis.maps}
    write_results(output, arrays | {"results.json": analysis.results})
