"""Write an ablation: ablation.json and its schema, tables, arrays, figures, a page."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasink.analysis.ablate.results import AblationResults
from megasink.analysis.pages.ablation_figures import Arrays, draw_all
from megasink.analysis.pages.ablation_page import in_words, page
from megasink.analysis.pages.csv_file import write_csv
from megasink.analysis.pages.drawing import write_page
from megasink.analysis.results_files import write_arrays, write_json, writing
from megasink.printable import say


def write_ablation(results: AblationResults, masks: Arrays, tsne: Arrays, output: Path) -> None:
    """Write everything about an ablation to a folder, and print its summary.

    Args:
        results: contents of ablation.json.
        masks: contents of points.npz.
        tsne: contents of tsne.npz; empty if there is none.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    pictures = draw_all(results, masks, tsne)
    with writing(output):
        write_arrays(output / "points.npz", masks)
        write_arrays(output / "tsne.npz", tsne)
        rows = list(_rows(results))
        write_csv(output / "ablation.csv", list(rows[0]), rows)
        write_page(page(results, pictures), pictures, output)
        write_json(output / "ablation.json", results)
    for line in in_words(results):
        say(line)
    print(f"wrote {output}/report.html, ablation.json and its schema, ablation.csv, *.npz")


def _rows(results: AblationResults) -> Iterator[Mapping[str, Any]]:
    """Yield a line of ablation.csv for each point and dataset or task."""
    for point in results.points:
        for on, value in point.values.items():
            yield {
                "row": point.row,
                "label": point.label,
                "asked_percent": point.asked,
                "seed": point.seed,
                "zeroed_percent": point.zeroed,
                "on": on,
                "value": value.value,
                "change": value.change,
                "standard_error": value.standard_error,
                "bits_per_byte": value.bits_per_byte,
                "samples": value.samples,
            }
