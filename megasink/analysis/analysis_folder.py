"""Read a finished analysis from disk, and list its tables."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.analysis_object import INACTIVE_SHARE, Analysis, Floats, array
from megasink.analysis.capture.input_samples import shown
from megasink.analysis.metrics import metrics, metrics_shown
from megasink.analysis.metrics.registry import AXES
from megasink.analysis.pages.analysis_figures import drawings
from megasink.analysis.result_schemas import FORMAT, Results, SampleResults, number_of
from megasink.analysis.result_store import read_arrays
from megasink.checkpoints.find import runs_in
from megasink.errors import UserError
from megasink.files.checked_fields import checked, from_json
from megasink.files.json_file import read_object

Arrays = dict[str, NDArray[Any]]

TABLE_POSITIONS = 8
"""Token positions that have a column in the tables of states."""


@checked
def read_analysis(folder: str | Path) -> Analysis:
    """Read the results of `megasink analyze` or `analyze(..., output=folder)`.

    Raises:
        UserError: the folder holds no analysis, or one of another format.
    """
    folder = Path(folder)
    path = folder / "results.json"
    try:
        content = read_object(path)
    except UserError as error:
        others = runs_in(folder, path.name, "analyses")
        raise UserError(f"{folder} {others or f'does not hold an analysis: {error}'}") from error
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {content.get('format')}, but this version reads {FORMAT}: analyze "
            "the model again"
        )
    try:
        results: Results = from_json(Results, content, str(path))
    except UserError as error:
        raise UserError(f"{error}: analyze the model again") from error
    if not (folder / "samples.npz").is_file():
        raise UserError(f"{folder} has no samples.npz: analyze the model again")
    samples, maps, points = (
        read_arrays(file, "analyze the model again") if file.is_file() else {}
        for file in (folder / f"{name}.npz" for name in ("samples", "maps", "geometry"))
    )
    analysis = analysis_of(results, samples, maps, points)
    if "dataset" not in samples and len(results.run.inputs) > 1:  # numbers of all inputs together
        raise UserError(f"{path} mixes texts and synthetic tokens: analyze the model again")
    if problem := next(_problems(results, analysis.by_sample), None):
        raise UserError(f"{path}: {problem}: analyze the model again")
    return analysis


def analysis_of(results: Results, samples: Arrays, maps: Arrays, points: Arrays) -> Analysis:
    """Build an analysis from the contents of its files: results.json and three files of arrays."""
    wanted = {n for n, e in metrics().items() if e.inactive or "wasserstein" in e.shown}
    of = [str(name) for name in samples.get("dataset", np.zeros(0)).ravel()]
    about = np.isin(of, shown(of))
    by_sample = {
        name.removeprefix("metric/"): values[about] if len(values) == len(about) else values
        for name, values in samples.items()
        if name.removeprefix("metric/") in wanted and values.ndim
    }
    return Analysis(results.model.name, results, by_sample, maps, points, drawings)


def _problems(results: Results, by_sample: dict[str, Floats]) -> Iterator[str]:
    """Yield values that have the right types but are impossible in an analysis."""
    heads = results.model.heads
    if len(heads) != results.model.layers:
        yield f"model.heads has {len(heads)} entries for {results.model.layers} layers"
    sizes = {"L": len(heads), "H": max(heads, default=0), "S": 2 * len(heads) + 1}
    parts = {f"datasets.{name}.": of for name, of in results.datasets.items()}
    for where, of in ({"": results} | parts).items():
        if min(of.samples, of.tokens) < 1:
            yield f"{where}samples {of.samples} and tokens {of.tokens}: both must be 1 or more"
        for name in of.metrics.keys() & metrics().keys():
            axis = AXES[metrics()[name].axis][0]
            try:
                values = array(of.metrics[name].values)
            except (TypeError, ValueError):  # names, or rows of different lengths
                yield f"{where}metrics.{name}.values is not a table of numbers"
                continue
            sides = zip(axis, values.shape, strict=False)
            if len(values.shape) != len(axis) or any(sizes.get(c, n) != n for c, n in sides):
                yield (
                    f"{where}metrics.{name}.values has shape {values.shape}, which does not fit "
                    f"the axis {axis or 'model'}"
                )
            elif not np.isfinite(values).any():
                yield f"{where}metrics.{name}.values has no finite number"
    inactive = results.inactive_heads
    known = {name for name, entry in metrics().items() if entry.inactive}
    for name in (*inactive.thresholds, *inactive.agreement.scores):
        if name not in known:
            yield (
                f"inactive_heads has the score {name!r}, which no loaded module defines (is a "
                "--plugin missing?)"
            )
        elif name not in by_sample or name not in results.metrics:
            yield f"the score {name} has no values by sample"
        elif INACTIVE_SHARE not in inactive.thresholds.get(name, {}):
            yield f"inactive_heads.thresholds.{name} has no threshold for share {INACTIVE_SHARE}"
        elif len(inactive.share_by_layer.get(name, ())) != len(heads):
            yield f"inactive_heads.share_by_layer.{name} does not have one value for each layer"


def tables_of(analysis: Analysis) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables heads, layers, states, scores and datasets."""
    results = analysis.results
    heads = [(i, head) for i, count in enumerate(results.model.heads) for head in range(count)]
    tables: dict[str, list[dict[str, Any]]] = {
        "heads": [{"layer": layer, "head": head} for layer, head in heads],
        "layers": [{"layer": layer} for layer in range(results.model.layers)],
        # 0 the embedding, 0.5 after attention of block 0.
        "states": [{"state": half / 2} for half in range(2 * results.model.layers + 1)],
        "scores": [
            {"score": name, **{f"threshold_at_{share}": tau for share, tau in taus.items()}}
            for name, taus in results.inactive_heads.thresholds.items()
        ],
        "datasets": [
            {"dataset": name, **summary_cells(of)} for name, of in results.datasets.items()
        ],
    }

    def add(table: str, column: str, cells: Any) -> None:
        for row, cell in zip(tables[f"{table}s"], cells, strict=True):
            row[column] = cell

    datasets = list(results.datasets) if len(results.datasets) > 1 else []
    for name, entry in metrics_shown("table").items():
        if not analysis.has(name):
            continue
        values, (table, *others) = analysis.values(name), entry.axis.split()
        if entry.axis == "head":
            add(table, name, [values[head] for head in heads])
            for dataset in datasets if "heatmap" in entry.shown else ():  # load of heads (P0.22)
                of = analysis.values(name, dataset)
                add(table, f"{name}_on_{dataset}", [of[head] for head in heads])
        elif entry.axis in ("layer", "state"):
            add(table, name, values)
        elif others == ["position"]:
            for position in range(min(TABLE_POSITIONS, values.shape[1])):
                add(table, f"{name}_at_{position}", values[:, position])
    return tables


def summary_cells(of: SampleResults) -> dict[str, Any]:
    """Return the number of each metric shown in tables; None if not measured."""
    numbers = {name: number_of(of, name) for name, e in metrics().items() if e.is_summarized}
    return {"samples": of.samples, "tokens": of.tokens, **numbers}
