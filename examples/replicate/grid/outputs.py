"""Write results.json, the table and the figures of a grid."""

import json
from pathlib import Path

from examples.replicate.grid.figures import draw_cells, draw_curves
from examples.replicate.grid.file import GridFile
from examples.replicate.grid.results import RESULTS, GridResults, cell_results, grid_results
from examples.replicate.grid.schedule import Outcome
from examples.replicate.grid.table import write_tables
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.checked_fields import to_json


def write_results(grid: GridFile, out: Path, outcome: Outcome) -> GridResults:
    """Write results.json, table.csv and table.md, and return the first.

    Raises:
        UserError: a file cannot be written.
    """
    cells = {}
    for cell in grid.cells:
        names = {seed: f"{cell.name}, seed {seed}" for seed in grid.seeds}
        records = [outcome.records[name] for name in names.values() if name in outcome.records]
        missing = {
            seed: outcome.failures.get(name, "not finished")
            for seed, name in names.items()
            if name not in outcome.records
        }
        cells[cell.name] = cell_results(cell.points, records, missing)
    results = grid_results(grid.title, grid.seeds, grid.metrics, grid.axes, cells)
    try:
        atomic_text(out / RESULTS, json.dumps(to_json(results)) + "\n")
        write_tables(results, out)
    except OSError as error:
        raise UserError(f"--output {out} cannot be written: {error.strerror or error}") from error
    return results


def write_figures(results: GridResults, out: Path) -> None:
    """Draw grid.png and curves.png.

    Raises:
        UserError: a file cannot be written.
    """
    try:
        draw_cells(results, out / "grid.png")
        draw_curves(results, out / "curves.png")
    except OSError as error:
        raise UserError(f"--output {out} cannot be written: {error.strerror or error}") from error
