"""The tables of what is saved for backward: here, and by kernels that are not in use."""

from collections.abc import Container, Sequence

from rich.markup import escape
from rich.table import Table

from megasink.plan.job import Record

_MIB = 2**20


def saved(record: Record) -> Table:
    """Return what each module saves in a microbatch on a rank, the most first."""
    title = f"saved for backward by a microbatch on rank {record['rank']}, MiB"
    table = _table(title, ("module", "class", "layers", "each", "all"), right=(2, 3, 4))
    for row in sorted(record["saved"], key=lambda row: -row["bytes"]):
        of_layers = row["layers"] > 0
        name = row["module"] or ("the layer" if of_layers else "around the model")
        each = _mib(row["bytes"] / row["layers"]) if of_layers else ""
        number = str(row["layers"]) if of_layers else ""
        table.add_row(name, row["kind"], number, each, _mib(row["bytes"]))
    table.add_section()
    table.add_row("all", "", "", "", _mib(sum(row["bytes"] for row in record["saved"])))
    return table


def other_kernels(records: Sequence[Record]) -> Table:
    """Return what kernels that are not in use here would save more or less, from shapes."""
    table = _table(
        "with fused kernels that are not in use here (from shapes, not run), MiB",
        ("kernels", *(f"stage {record['stage']}" for record in records), "install"),
        right=range(1, len(records) + 1),
    )
    for rows in zip(*(record["other_kernels"] for record in records), strict=True):
        of_stages = (_change(row["bytes"]) for row in rows)
        table.add_row(rows[0]["name"], *of_stages, escape(rows[0]["install"]))
    return table


def _change(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / _MIB:+.2f}" if size else "same"


def _mib(size: float) -> str:
    return f"{size / _MIB:.2f}"


def _table(title: str, columns: Sequence[str], right: Container[int]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in right else "left")
    return table
