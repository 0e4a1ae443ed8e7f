"""Write an ablation: ablation.json and its schema, tables, arrays, figures, a page."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megasink.atomic import atomic_file, atomic_text
from megasink.diagnostics.ablation import AblationResults
from megasink.errors import UserError
from megasink.printable import say
from megasink.report.ablation_figures import Arrays, draw_all
from megasink.report.ablation_page import in_words, page
from megasink.report.csv_file import write_csv
from megasink.report.style import rendered
from megasink.typed_json import schema_of, to_json


def write_ablation(results: AblationResults, masks: Arrays, tsne: Arrays, output: Path) -> None:
    """Write everything about an ablation to a folder, and print its summary.

    Args:
        results: contents of ablation.json.
        masks: contents of points.npz.
        tsne: contents of tsne.npz; empty if there is none.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= schema_of(AblationResults)
    pictures = {name: rendered(figure) for name, figure in draw_all(results, masks, tsne).items()}
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        for old in output.glob("figures/*.png"):
            old.unlink()  # of an earlier sweep with other options
        for name, arrays in (("points", masks), ("tsne", tsne)):
            if not arrays:
                (output / f"{name}.npz").unlink(missing_ok=True)  # of an earlier sweep
                continue
            with atomic_file(output / f"{name}.npz") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
        rows = list(_rows(results))
        write_csv(output / "ablation.csv", list(rows[0]), rows)
        for name, png in pictures.items():
            (output / "figures" / f"{name}.png").write_bytes(png)
        (output / "report.html").write_text(page(results, pictures))
        for name, told in (("ablation.schema", schema), ("ablation", to_json(results))):
            atomic_text(output / f"{name}.json", json.dumps(told, indent=1))
    except OSError as error:
        raise UserError(
            f"the results cannot be written to {output} ({error.strerror or error}): free some "
            "space and repeat the command, which then writes them without measuring again"
        ) from error
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
