"""Write an analysis: numbers first, then tables, figures and the page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.capture.geometry import Geometry
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.maps import Arrays
from megasink.analysis.capture.measurements import Measurements
from megasink.analysis.draw import write_report
from megasink.analysis.metrics import metrics
from megasink.analysis.pages.analysis_page import in_words
from megasink.analysis.results import Results, RunFacts
from megasink.analysis.results_files import write_json, writing
from megasink.analysis.stored import write_arrays
from megasink.analysis.summary import summarize
from megasink.printable import printable, say
from megasink.typed_json import schema_of


def write_own_page(output: Path, results: Results) -> None:
    """Write the page, figures and tables of the numbers in a folder, and print their summary."""
    with writing(output):
        (analysis,) = write_report([output], output)
    for line in in_words(analysis):
        say(line)
    for entry in results.non_finite:
        print(
            f"megasink: warning: {printable(entry.source)} has infinite or NaN values in layers "
            f"{entry.layers}, heads {entry.heads}: left out of every average",
            file=sys.stderr,
        )
    print(f"wrote {output}/report.html, results.json and its schema, *.npz, tables/, figures/")


def write_numbers(
    output: Path,
    measurements: Measurements,
    samples: Sequence[Sample],
    model: dict[str, Any],
    run: RunFacts,
    geometry: Geometry | None = None,
    maps: Arrays | None = None,
) -> Results:
    """Write results.json, its schema and the arrays, and return the first.

    `megasink report` creates the rest.

    Args:
        run: the options and inputs.
        geometry: result of `project`; None if not computed.
        maps: from `megasink.analysis.capture.maps.geometry`; None if not requested.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    analysis = measurements.analysis_values(run.seed)
    results = summarize(
        measurements,
        analysis,
        model=model,
        run=run,
        inputs=samples,
        geometry=None if geometry is None else geometry.results,
    )
    by_sample = measurements.by_sample(run.seed)
    arrays: dict[str, Any] = {f"metric/{name}": values for name, values in by_sample.items()}
    arrays["dataset"] = np.asarray([sample.dataset for sample in measurements.samples])
    arrays["tokens"] = np.asarray([sample.tokens for sample in measurements.samples])
    arrays["source"] = np.asarray([sample.source for sample in measurements.samples])
    points = None if geometry is None else geometry.arrays
    with writing(output):
        for name, content in (("samples", arrays), ("geometry", points), ("maps", maps)):
            write_arrays(output / f"{name}.npz", content)
        write_json(output / "results.json", results, results_schema())
    return results


def results_schema() -> dict[str, Any]:
    """Return the JSON schema of results.json: the dataclasses, and each metric's description."""
    schema = schema_of(Results)
    of_datasets = schema["properties"]["datasets"]["additionalProperties"]
    for part in (schema, of_datasets):
        of_metrics = part["properties"]["metrics"]
        result = of_metrics["additionalProperties"]
        of_metrics["properties"] = {
            entry.name: result
            | {
                "title": entry.title,
                "description": f"{entry.definition} Unit: {entry.unit}. Axis: {entry.axis}. "
                f"Source: {entry.source}.",
            }
            for entry in metrics().values()
        }
    return schema
