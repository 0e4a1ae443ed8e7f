"""The figures of a grid: every metric by cell, and curves with a band over the seeds."""

from pathlib import Path

from examples.replicate.grid.bands import band_of
from examples.replicate.grid.cell_figures import draw_bands, draw_numbers
from examples.replicate.grid.results import GridResults
from megasink.figures.style import save, short, styled

_CURVES = ("lm_loss", "valid_bits_per_byte", "valid_lm_loss", "imbalance")


@styled()
def draw_curves(results: GridResults, output: Path) -> None:
    """Draw losses and imbalance over steps: mean and standard deviation over seeds, by cell.

    Raises:
        OSError: the file cannot be written.
    """
    curves = {}
    for name in dict.fromkeys((*_CURVES, *results.metrics)):
        bands = {cell: band_of(of, name) for cell, of in results.cells.items()}
        if known := {cell: band for cell, band in bands.items() if band is not None}:
            curves[name] = known
    if "valid_bits_per_byte" in curves:
        curves.pop("valid_lm_loss", None)
    save(draw_bands(curves, list(results.cells), results.title), output)


@styled()
def draw_cells(results: GridResults, output: Path) -> None:
    """Draw each metric of the file: the points of all seeds, mean and deviation, by cell.

    Raises:
        OSError: the file cannot be written.
    """
    # Names of categories stand in the table alone.
    known = {name for cell in results.cells.values() for name in cell.metrics}
    shown = [name for name in results.metrics if name in known] or results.metrics[:1]
    numbers = {
        name: {
            cell: list(of.metrics[name].values.values())
            for cell, of in results.cells.items()
            if name in of.metrics
        }
        for name in shown
    }
    labels = {name: _label(name, results) for name in results.cells}
    save(draw_numbers(numbers, labels, results.title), output)


def _label(name: str, results: GridResults) -> str:
    cell = results.cells[name]
    parts = [short(name, 40)]
    if cell.diverged:
        total = len(cell.runs) + len(cell.missing)
        parts.append(f"{len(cell.diverged)} of {total} diverged")
    return "\n".join(parts)
