"""Read the rows of parquet files in a process with limited memory (see `parquet_rows`)."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from megasink.data import parquet_rows
from megasink.errors import UserError
from megasink.extras import require


class ParquetReader:
    """Reads columns of text.

    Its process starts with the first file, and ends with the context.

    Args:
        max_bytes: maximum size of one cell.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def rows(self, path: Path, key: str) -> Iterator[tuple[bytes | None, float]]:
        """Yield the cells of column `key` (b"" for null, None for a cell that is too long), and the
        share of the file that has been read.

        Args:
            path: the file.
            key: the column.

        Raises:
            UserError: not a parquet file, a missing column or one of another type, or a file that
                needs more memory than documents of `max_bytes` do.
        """
        require("pyarrow", str(path))
        if sys.platform != "linux":  # the reader's memory is bounded as Linux does it
            raise UserError(f"{path}: parquet is read on Linux alone; write it as .jsonl")
        self._process = process = self._process or self._start()
        assert process.stdin is not None
        try:
            asked = json.dumps({"path": str(path), "key": key}).encode()
            process.stdin.write(asked + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._died(process, path) from None
        total, row = 1, 0
        while True:
            kind, content = self._frame(process, path)
            if kind == parquet_rows.END:
                return
            if kind == parquet_rows.ERROR:
                raise UserError(content.decode("utf-8", "replace"))
            if kind == parquet_rows.ROWS:
                total = max(int(content), 1)
                continue
            row += 1
            yield None if kind == parquet_rows.TOO_LONG else content, min(row / total, 1.0)

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            # -P: import nothing from the program's folder, or from the current one
            [sys.executable, "-P", parquet_rows.__file__, str(self.max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _frame(self, process: "subprocess.Popen[bytes]", path: Path) -> tuple[bytes, bytes]:
        assert process.stdout is not None
        head = process.stdout.read(9)
        size = int.from_bytes(head[1:], "big")
        content = process.stdout.read(size) if len(head) == 9 else b""
        if len(head) < 9 or len(content) < size:
            raise self._died(process, path)
        return head[:1], content

    def _died(self, process: "subprocess.Popen[bytes]", path: Path) -> UserError:
        code = process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        memory = parquet_rows.memory_limit(self.max_bytes)
        return UserError(
            f"{path} cannot be read: the parquet reader ended with {how}; the file is damaged or "
            f"needs more than {memory:,} bytes of memory (raise --max-document-bytes)"
        )
