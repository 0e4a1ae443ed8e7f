"""Write the page, figures and tables of analyses."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.analysis import Analysis
from megasink.analysis.folder import write_tables
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.analysis_figures import figures
from megasink.analysis.pages.analysis_page import page
from megasink.analysis.pages.comparable import differences
from megasink.analysis.pages.drawing import write_page


def write_report(
    analyses: Sequence[Analysis], output: Path, *, kinds: Sequence[str] = ("png",)
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
    write_page(page(analyses, pictures), pictures, output)
    if len(analyses) == 1:
        write_tables(analyses[0], output / "tables")
