"""Documents out of files, folders, JSON Lines, parquet and the Python standard library.

The order is fixed: inputs as given, folders by sorted relative path, records as in their file.
"""

import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Literal, cast

from megasink.errors import ConfigError, UserError

STDLIB = "stdlib:"
"""The input that stands for the sources of the running interpreter's standard library."""

InvalidUtf8 = Literal["skip", "error"]

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_ROWS_PER_BATCH = 256
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, and where it came from (`path`, `path:line` or `path#row`)."""

    text: str
    source: str


@dataclass
class Skipped:
    """What an iteration left out: counts, and the first few sources that are not UTF-8 text."""

    invalid_utf8: int = 0
    empty: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    kind: Literal["text", "lines", "parquet"]
    compression: str | None
    size: int


# A reader yields: source, text (None where the bytes are not UTF-8), bytes read of the file so far.
_Item = tuple[str, str | None, int]


class Corpus:
    """The documents of `inputs`; every iteration starts over and gives the same ones.

    A file is one document unless its name ends in `.jsonl` or `.ndjson` (also `.gz`, `.zst`): one
    per line; or in `.parquet`: one per row. A `.json` file is read as JSON Lines when it is named
    as an input or when, in a folder, its first line is an object holding `json_key`; else it is
    text. Folders are read recursively, without `__pycache__` and names that start with a dot.

    Args:
        inputs: files, folders, or `stdlib:` (see `STDLIB`).
        json_key: the key of a JSON object, or the column of a parquet file, that holds the text.
        on_invalid_utf8: what to do with a document that is not UTF-8 text (or a text file with NUL
            bytes): `skip` counts it in `skipped`, `error` raises UserError.

    Attributes:
        total_bytes: size on disk of all files, in bytes.
        read_bytes: how many of them the current iteration has read.
        skipped: what the current iteration has left out so far.

    Raises:
        ConfigError: inputs that are missing or no files, all of them in one message.
        UserError: while iterating: a file that cannot be read, a line that is not a JSON object, a
            missing key or column, or no document at all.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        json_key: str = "text",
        on_invalid_utf8: InvalidUtf8 = "skip",
    ):
        self.inputs = [str(i) for i in inputs]
        self.json_key = json_key
        self.on_invalid_utf8 = on_invalid_utf8
        self.skipped = Skipped()
        self.read_bytes = 0
        self._files: list[_File] = []
        problems = [] if inputs else ["no input: name files or folders, or `stdlib:`"]
        for item in self.inputs:
            try:
                self._files += _expand(item, json_key)
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError(problems)
        self.total_bytes = sum(f.size for f in self._files)

    def __iter__(self) -> Iterator[Document]:
        self.skipped = Skipped()
        self.read_bytes = done = documents = 0
        for file in self._files:
            with _readable(file.path):
                for source, text, position in self._read(file):
                    self.read_bytes = done + min(position, file.size)
                    if text is None:
                        self._invalid(source)
                    elif not text:
                        self.skipped.empty += 1
                    else:
                        documents += 1
                        yield Document(text, source)
            done += file.size
            self.read_bytes = done
        if not documents:
            raise UserError(
                f"no document in {' '.join(self.inputs)}: {len(self._files)} files, "
                f"{self.skipped.empty} empty and {self.skipped.invalid_utf8} not UTF-8 text"
            )

    def _read(self, file: _File) -> Iterator[_Item]:
        if file.kind == "text":
            yield _read_text(file)
        elif file.kind == "parquet":
            yield from _read_parquet(file, self.json_key)
        else:
            yield from _read_lines(file, self.json_key)

    def _invalid(self, source: str) -> None:
        if self.on_invalid_utf8 == "error":
            raise UserError(
                f"{source} is not UTF-8 text: convert it, or pass --on-invalid-utf8 skip"
            )
        self.skipped.invalid_utf8 += 1
        if len(self.skipped.examples) < _EXAMPLES:
            self.skipped.examples.append(source)


def _expand(item: str, json_key: str) -> list[_File]:
    if item == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata holds the paths of the machine that built the interpreter.
        paths = [
            p
            for p in _walk(root, _STDLIB_LEFT_OUT)
            if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")
        ]
        if not paths:
            raise UserError(f"stdlib: {root} holds no Python sources: name files instead")
        return [_classify(p, json_key, named=False) for p in paths]
    path = Path(item)
    if path.is_dir():
        return [_classify(p, json_key, named=False) for p in _walk(path, {"__pycache__"})]
    if path.is_file():
        return [_classify(path, json_key, named=True)]
    state = "is no regular file" if path.exists() else "does not exist"
    raise UserError(f"input {item} {state}: name a file, a folder or `stdlib:`")


def _walk(root: Path, left_out: set[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"folder {error.filename} cannot be read: {error.strerror}")

    found = []
    for folder, subfolders, names in root.walk(on_error=refuse):
        subfolders[:] = [s for s in subfolders if s not in left_out and not s.startswith(".")]
        found += [folder / n for n in names if not n.startswith(".")]
    return sorted(found, key=lambda p: p.relative_to(root).parts)


def _classify(path: Path, json_key: str, *, named: bool) -> _File:
    with _readable(path):
        size = path.stat().st_size
    name = path.name.lower()
    compression = _COMPRESSION.get(Path(name).suffix)
    inner = Path(name).stem if compression else name
    if inner.endswith(_JSON_LINES) and (
        named or not inner.endswith(".json") or _first_line_has(path, compression, json_key)
    ):
        return _File(path, "lines", compression, size)
    return _File(path, "parquet" if name.endswith(".parquet") else "text", None, size)


def _first_line_has(path: Path, compression: str | None, key: str) -> bool:
    with _readable(path), _open(path, compression) as (lines, _):
        try:
            record = json.loads(lines.readline())
        except ValueError:
            return False
    return isinstance(record, dict) and key in record


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # pyarrow raises OSError without strerror, for a damaged .gz or .zst too
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _open(
    path: Path, compression: str | None
) -> Iterator[tuple[BufferedReader, Callable[[], int]]]:
    """The decompressed stream of `path`, and a function that says how far its file was read."""
    with path.open("rb") as raw:
        if compression is None:
            yield raw, raw.tell
            return
        import pyarrow as pa

        # pyarrow refuses a truncated zstd stream; zstandard's own reader just ends there.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)
        yield BufferedReader(cast("BufferedReader", stream)), raw.tell


def _read_text(file: _File) -> _Item:
    data = file.path.read_bytes()
    # NUL is valid UTF-8, but no text file holds it: this keeps archives in a folder out.
    return str(file.path), None if b"\0" in data else _decode(data), file.size


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_lines(file: _File, key: str) -> Iterator[_Item]:
    with _open(file.path, file.compression) as (lines, tell):
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            source = f"{file.path}:{number}"
            decoded = _decode(line)
            if decoded is None:
                yield source, None, tell()
                continue
            try:
                record = json.loads(decoded)
            except ValueError as error:
                raise UserError(
                    f"{source} is not valid JSON ({error}): each line must be one JSON object"
                ) from error
            if not isinstance(record, dict):
                raise UserError(f"{source} holds a JSON {type(record).__name__}, not an object")
            if key not in record:
                raise UserError(
                    f"{source} has no key {key!r}: pass --json-key, one of {sorted(record)}"
                )
            yield source, _checked(record[key], source, key), tell()


def _checked(value: object, source: str, key: str) -> str | None:
    """A record's text: "" for null, None for text with lone surrogates, which UTF-8 has not."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{source}: {key!r} holds a {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return value


def _read_parquet(file: _File, key: str) -> Iterator[_Item]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as table:
            names = table.schema_arrow.names
            if key not in names:
                raise UserError(
                    f"{file.path} has no column {key!r}: pass --json-key, one of {sorted(names)}"
                )
            kind = table.schema_arrow.field(key).type
            value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(value_type) or pa.types.is_large_string(value_type)):
                raise UserError(f"{file.path}: column {key!r} holds {kind}, not strings")
            rows, row = max(table.metadata.num_rows, 1), 0
            for batch in table.iter_batches(_ROWS_PER_BATCH, columns=[key]):
                for value in batch.column(0):
                    row += 1
                    yield f"{file.path}#{row}", _cell(value), file.size * row // rows
    except pa.ArrowInvalid as error:
        raise UserError(f"{file.path} is not a readable parquet file: {error}") from error


def _cell(value: object) -> str | None:
    try:
        return value.as_py() or ""  # type: ignore[attr-defined]
    except UnicodeDecodeError:
        return None
