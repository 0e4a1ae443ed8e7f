"""The table of a grid: mean and standard deviation over seeds, by cell."""

import math
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from examples.replicate.grid.results import CellResults, GridResults, Spread
from megasink.analysis.result_store import write_csv
from megasink.console.printable import printable
from megasink.console.stdout import wide_console
from megasink.files.atomic import atomic_text


def write_tables(results: GridResults, folder: Path) -> None:
    """Write table.csv (numbers) and table.md (text).

    Raises:
        OSError: a file cannot be written.
    """
    rows = [_numbers(name, cell, results) for name, cell in results.cells.items()]
    write_csv(folder / "table.csv", list(rows[0]), rows)
    atomic_text(folder / "table.md", markdown(results))


def markdown(results: GridResults) -> str:
    """Return the table in Markdown, under its title."""
    header = ["cell", *results.metrics, "seeds", "CPU minutes"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [row_of(name, cell, results) for name, cell in results.cells.items()]
    table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
    made = "; ".join([*results.hardware, results.date])
    about = f"Mean ± standard deviation over seeds (n - 1). {made}"
    return f"# {printable(results.title)}\n\n{table}\n\n{printable(about)}\n"


def print_table(results: GridResults) -> None:
    """Print the table."""
    table = Table(box=None, title=Text(printable(results.title)), title_justify="left")
    table.add_column("cell")
    for name in (*results.metrics, "seeds", "CPU minutes"):
        table.add_column(Text(printable(name)), justify="right")
    for name, cell in results.cells.items():
        table.add_row(*(Text(printable(text)) for text in row_of(name, cell, results)))
    wide_console().print(table)


def row_of(name: str, cell: CellResults, results: GridResults) -> list[str]:
    """Return the texts of a row: the cell, its metrics, its seeds, its CPU minutes."""
    metrics = [metric_of(cell, metric) for metric in results.metrics]
    return [name, *metrics, seeds_of(cell), f"{cell.cpu_minutes:.1f}"]


def text_of(spread: Spread) -> str:
    """Return "mean ± standard deviation", the latter with two digits."""
    deviation = spread.standard_deviation
    if deviation is None:
        return f"{spread.mean:.4g}"
    if deviation == 0:
        return f"{spread.mean:.4g} ± 0"
    digits = 1 - math.floor(math.log10(deviation))
    if digits > 6:  # 1.2e-7: as many digits in front of it would not be read
        return f"{spread.mean:.4g} ± {deviation:.1e}"
    return f"{spread.mean:.{max(0, digits)}f} ± {deviation:.{max(0, digits)}f}"


def seeds_of(cell: CellResults) -> str:
    """Return how many seeds are finished, diverged, missing."""
    total = len(cell.runs) + len(cell.missing)
    parts = [str(len(cell.runs))]
    if cell.diverged:
        parts.append(f"{len(cell.diverged)} of {total} diverged")
    if cell.missing:
        parts.append(f"{len(cell.missing)} of {total} missing")
    return ", ".join(parts)


def metric_of(cell: CellResults, name: str) -> str:
    """Return the text of a metric: its spread, or the categories that the seeds have."""
    if name == "diverged":
        return f"{len(cell.diverged)} of {len(cell.runs)}"
    if (spread := cell.metrics.get(name)) is not None:
        less = spread.count < len(cell.runs)
        return text_of(spread) + f" (n = {spread.count})" * less
    values = [str(run.metrics[name]) for run in cell.runs.values() if run.metrics.get(name)]
    return ", ".join(f"{values.count(value)} {value}" for value in dict.fromkeys(values)) or "-"


def _numbers(name: str, cell: CellResults, results: GridResults) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": name, **{f"axis {k}": v for k, v in cell.points.items()}}
    for metric in results.metrics:
        spread = cell.metrics.get(metric)
        row[metric] = spread.mean if spread else None
        row[f"{metric} standard deviation"] = spread.standard_deviation if spread else None
        row[f"{metric} n"] = spread.count if spread else 0
    counts = {"diverged": len(cell.diverged), "missing": len(cell.missing)}
    return row | {"runs": len(cell.runs)} | counts | {"CPU minutes": cell.cpu_minutes}


def _cell(text: str) -> str:
    """Escape what would end a cell of a Markdown table."""
    return printable(text, keep="").replace("|", "\\|")
