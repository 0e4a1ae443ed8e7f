"""Writes an analysis: numbers first, then tables, figures and the page."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megasink.atomic import atomic_file, atomic_text
from megasink.errors import UserError
from megasink.printable import printable, say
from megasink.probe.geometry import Geometry
from megasink.probe.inputs import Sample, data_hash
from megasink.probe.maps import Arrays
from megasink.probe.parts import Captured
from megasink.probe.summary import all_scores, summarise
from megasink.report.analysis import read_analysis
from megasink.report.analysis_page import in_words
from megasink.report.pages import write_report

KEPT = ("data", "inputs", "bos", "seq_length", "max_samples", "seed", "device", "identity")
"""Options that results.json repeats under "run"."""


def write_analysis(
    output: Path,
    captured: Captured,
    samples: Sequence[Sample],
    model: dict[str, Any],
    options: dict[str, Any],
    geometry: Geometry,
    maps: Arrays | None = None,
) -> dict[str, Any]:
    """Write everything about one model into a folder, and print its summary.

    Args:
        options, geometry, maps: as `write_numbers`.

    Returns:
        results.json.

    Raises:
        UserError: as `write_numbers`.
    """
    found = write_numbers(output, captured, samples, model, options, geometry, maps)
    with _named(output):
        write_report([output], output)
    say(in_words(read_analysis(output)))
    for entry in captured.non_finite:
        print(
            f"megasink: warning: {printable(entry.source)} has infinite or NaN values in layers "
            f"{entry.layers}, heads {entry.heads}: left out of every average",
            file=sys.stderr,
        )
    print(f"wrote {output}/report.html, results.json, *.npz, tables/, figures/")
    return found


def write_numbers(
    output: Path,
    captured: Captured,
    samples: Sequence[Sample],
    model: dict[str, Any],
    options: dict[str, Any],
    geometry: Geometry | None = None,
    maps: Arrays | None = None,
) -> dict[str, Any]:
    """Write results.json and the arrays; `megasink report` makes the rest out of them.

    Args:
        options: of the command line, "seed" among them.
        geometry: what there is of it; None where it was not looked for.
        maps: of `megasink.probe.maps.geometry`; None where they were not asked for.

    Returns:
        results.json.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    facts = {key: options[key] for key in KEPT if key in options}
    found = summarise(
        captured,
        model=model,
        run={**facts, "data_sha256": data_hash(samples)},
        inputs=samples,
        geometry=None if geometry is None else geometry.found,
    )
    scores = all_scores(captured, int(options["seed"]))
    arrays: dict[str, Any] = {f"score/{name}": values for name, values in scores.items()}
    arrays |= {f"metric/{name}": values for name, values in captured.values.items()}
    arrays["tokens"] = np.asarray([sample["tokens"] for sample in captured.samples])
    arrays["source"] = np.asarray([str(sample["source"]) for sample in captured.samples])
    points = None if geometry is None else geometry.arrays
    with _named(output):
        output.mkdir(parents=True, exist_ok=True)
        for name, named in (("samples", arrays), ("geometry", points), ("maps", maps)):
            if named is None:
                (output / f"{name}.npz").unlink(missing_ok=True)  # of an earlier analysis
                continue
            with atomic_file(output / f"{name}.npz") as file:
                np.savez_compressed(file, allow_pickle=False, **named)
        atomic_text(output / "results.json", json.dumps(found, indent=1))
    return found


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """What the system says while something is written, with what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the results cannot be written to {output} ({error.strerror or error}): make room, "
            "and the same command writes them without measuring anything again"
        ) from error
