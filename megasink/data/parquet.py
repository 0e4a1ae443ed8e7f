"""Read a column of text from a parquet file, row by row; Arrow holds one of its pages at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.errors import UserError

_BUFFER = 1 << 20  # of the column; its pages are read on demand
_SLACK = 1 << 20


def rows(path: Path, key: str, max_bytes: int) -> Iterator[tuple[bytes | None, float]]:
    """Yield the cells of column `key` (b"" for null, None for a cell of more than `max_bytes`), and
    the share of the file that has been read.
    """
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            _check(file, path, key, max_bytes)
            total = file.metadata.num_rows
            # One row: a batch repeats a value that the file may hold once.
            batches = file.iter_batches(1, columns=[key], use_threads=False)
            for number, batch in enumerate(batches, 1):
                cell = _buffer(batch.column(0)[0])
                is_long = cell is not None and cell.size > max_bytes
                content = b"" if cell is None else None if is_long else cell.to_pybytes()
                yield content, number / total
    except UserError:
        raise
    except Exception as error:  # Arrow raises nearly anything on a damaged file
        if isinstance(error, OSError) and error.strerror:
            raise  # of the file system
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable parquet file: {reason}") from error


def _check(file: Any, path: Path, key: str, max_bytes: int) -> None:
    import pyarrow as pa

    names = file.schema_arrow.names
    if key not in names:
        raise UserError(f"{path} has no column {key!r}: pass --json-key, one of {sorted(names)}")
    kind = file.schema_arrow.field(key).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
        raise UserError(f"{path}: column {key!r} holds {kind}, not strings")
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            # A page of one cell would be in memory before its size is known.
            most = 2 * max_bytes * column.num_values + _SLACK
            if column.path_in_schema == key and column.total_uncompressed_size > most:
                raise UserError(
                    f"{path}: cells of column {key!r} are longer than the limit of {max_bytes:,} "
                    "bytes per document: split them, or raise --max-document-bytes"
                )


def _buffer(value: Any) -> Any:
    """Return the bytes of a string, or None for null."""
    import pyarrow as pa

    return (value.value if isinstance(value, pa.DictionaryScalar) else value).as_buffer()
