"""Write the page, figures and tables of analyses on disk."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megasink.analysis.analysis import Analysis
from megasink.analysis.folder import read_analysis, write_tables
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.analysis_figures import figures
from megasink.analysis.pages.analysis_page import page
from megasink.analysis.pages.comparable import differences, name_apart
from megasink.analysis.pages.drawing import write_page


def write_report(
    folders: Sequence[Path], output: Path, *, kinds: Sequence[str] = ("png",)
) -> list[Analysis]:
    """Write the page and figures of one or several analyses, and return what was read.

    Tables are written for a single analysis only. Analyses of one name get their folder's too.

    Args:
        kinds: figure file types to write next to the page: "png", "pdf".

    Raises:
        UserError: a folder holds no analysis, or is given twice.
    """
    analyses = [read_analysis(folder) for folder in folders]
    name_apart(analyses, folders)
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
    return analyses
