"""The program that reads parquet for `megasink.data.parquet`, in a separate process.

A small file can require any amount of memory (one dictionary value for every row, a page that
decompresses to gigabytes). Arrow has no memory limit, but the kernel has one per process. A failure
that Arrow cannot survive ends this process, not the caller's.

Reads one JSON line {"path", "key"} per file from standard input, and answers with frames on
standard output: one byte for the kind, eight for the size (big-endian), then the content.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

ROWS, TEXT, NULL, TOO_LONG, ERROR, END = b"R", b"T", b"N", b"L", b"E", b"."
_ROWS_PER_BATCH = 256
_BATCH_BYTES = 16 << 20
_MEMORY = 512 << 20
_COPIES = 4
"""Copies of the longest document: in a page, decompressed, as values and as a batch of them."""


def memory_limit(max_document_bytes: int) -> int:
    """Return the bytes that reading may take on top of Python and Arrow."""
    return _COPIES * max_document_bytes + _MEMORY


def main() -> None:
    """Serve requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C, and ends this process
    import pyarrow as pa

    limit = int(sys.argv[1])
    # Arrow's own pools, and each of its threads, reserve more memory than they use.
    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    _warm_up()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bound = taken + memory_limit(limit)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            _read(asked["path"], asked["key"], limit, out)
            _frame(out, END)
        except BrokenPipeError:
            return
        except MemoryError:
            need = f"it needs more than {memory_limit(limit):,} bytes of memory"
            more = "write it with smaller pages, or raise --max-document-bytes"
            _frame(out, ERROR, f"{asked['path']} cannot be read: {need}: {more}".encode())
        except Exception as error:  # Arrow raises nearly anything on a damaged file
            _frame(out, ERROR, _explained(asked["path"], error).encode("utf-8", "replace"))
        out.flush()


def _warm_up() -> None:
    """Load Arrow's lazy parts, so that they do not count toward a file's memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": ["x"]}), buffer)
    pq.read_table(pa.BufferReader(buffer.getvalue()))


def _read(path: str, key: str, limit: int, out: BinaryIO) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(path) as file:
        described = pq.ParquetFile(file)
        names = described.schema_arrow.names
        if key not in names:
            raise _Refused(f"has no column {key!r}: pass --json-key, one of {sorted(names)}")
        kind = described.schema_arrow.field(key).type
        if not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise _Refused(f"column {key!r} holds {kind}, not strings")
        rows = described.metadata.num_rows
        _frame(out, ROWS, str(rows).encode())
        for value in _cells(file, key, _batch_rows(described.metadata, key)):
            content = _text(value)
            if content is None:
                _frame(out, NULL)
            elif content.size > limit:
                _frame(out, TOO_LONG)
            else:
                _frame(out, TEXT, memoryview(content))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _text(value: Any) -> Any:
    """Return the buffer of a string, or None for null."""
    import pyarrow as pa

    return (value.value if isinstance(value, pa.DictionaryScalar) else value).as_buffer()


def _cells(file: Any, key: str, batch_rows: int) -> Iterator[Any]:
    """Yield the values of a column; once a batch exceeds the memory, continue row by row.

    A batch repeats a value that the dictionary holds once, and the file does not say so.
    """
    import pyarrow.parquet as pq

    done = 0
    for size in (batch_rows, 1):
        row = 0
        try:
            # Pages are read as they are needed.
            for batch in pq.ParquetFile(file, buffer_size=1 << 20).iter_batches(
                size, columns=[key]
            ):
                for value in batch.column(0):
                    row += 1
                    if row > done:
                        done = row
                        yield value
            return
        except MemoryError:
            if size == 1:
                raise


def _batch_rows(metadata: Any, key: str) -> int:
    """Return the number of rows that take about 16 MiB, according to the file's metadata."""
    size = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        size += sum(
            c.total_uncompressed_size
            for c in columns
            if c.path_in_schema == key or c.path_in_schema.startswith(f"{key}.")
        )
    mean = max(size // max(metadata.num_rows, 1), 1)
    return max(1, min(_ROWS_PER_BATCH, _BATCH_BYTES // mean))


class _Refused(Exception):
    """A readable file that does not hold the requested data."""


def _explained(path: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, _Refused):
        return f"{path}: {reason}" if reason.startswith("column") else f"{path} {reason}"
    if isinstance(error, OSError) and error.strerror:
        return f"{path} cannot be read: {error.strerror}"
    return f"{path} is not a readable parquet file: {reason}"


def _frame(out: BinaryIO, kind: bytes, content: bytes | memoryview = b"") -> None:
    out.write(kind + len(content).to_bytes(8, "big"))
    out.write(content)


if __name__ == "__main__":
    main()
