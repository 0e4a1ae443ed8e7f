"""Write an analysis: numbers first, then tables, figures and the page."""

import sys
from pathlib import Path

from megasink.analysis.analysis import Analysis
from megasink.analysis.draw import write_report
from megasink.analysis.folder import Arrays
from megasink.analysis.pages.analysis_page import in_words
from megasink.analysis.pages.drawing import PAGE_FILES
from megasink.analysis.results_files import results_of, write_json
from megasink.analysis.stored import write_arrays
from megasink.console.printable import printable, say


def write_own_page(output: Path, analysis: Analysis) -> None:
    """Write the page, figures and tables of an analysis, and print its summary."""
    with results_of(output, (*PAGE_FILES, "tables/*.csv")) as folder:
        write_report([analysis], folder)
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
    files = {"samples": samples, "geometry": analysis.points, "maps": analysis.maps}
    with results_of(output, [f"{name}.npz" for name in files]) as folder:
        for name, arrays in files.items():
            write_arrays(folder / f"{name}.npz", arrays)
        write_json(folder / "results.json", analysis.results)
