"""The files of a data set: names, a lock, publication all at once, origin, and validation set."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megasink.console.printable import printable
from megasink.errors import Signalled, UserError
from megasink.files.atomic import sync, sync_folder
from megasink.files.json_file import read_object
from megasink.files.output_folder import folder_problem, locked
from megasink.files.system_errors import writing as saying


def is_stored(path: str | Path) -> bool:
    """Return whether a path is a URL of an object store, or `Path`'s form of one."""
    return str(path).startswith(("s3:/", "msc:/"))


def url_problem(url: str) -> str | None:
    """Return the problem of an object's URL, without the URL if it may contain a secret."""
    scheme, _, place = url.partition("://")
    if not place:
        return f"{url} is not the URL of an object: use s3://BUCKET/KEY or msc://PROFILE/KEY"
    if "@" in place or "?" in place:
        return (
            f"{scheme}:// URLs with '@' or '?' are rejected, because they would put credentials "
            "into the run folder: set credentials in the environment or in the library's own file"
        )
    names = place.split("/")
    # Megatron joins these to the folder of the indices (object_storage_utils.py:181).
    if len(names) < 2 or {"", ".", ".."} & set(names):
        return f"{url} does not name a bucket or profile and a key: use {scheme}://NAME/KEY"
    return None


FILES = (".json", ".bin", ".idx")
"""In order of publication: the `.idx` is last, because Megatron loads nothing without it."""
CHECKSUMS = "sha256"
"""Key of PREFIX.json: {suffix: checksum} of the other files."""
PROGRESS = ".progress"
LENGTHS = ".lengths"
# Files that may exist until the data set is published.
_PARTIAL = (*FILES, PROGRESS, LENGTHS)


class Written(NamedTuple):
    """The written part of a data set: documents, and bytes of tokens."""

    documents: int = 0
    token_bytes: int = 0


def part_of(prefix: Path, part: int, parts: int) -> Path:
    """Return the prefix of a part (from 1 on) of the data set of `prefix`."""
    return prefix.with_name(f"{prefix.name}-{part}-of-{parts}")


def file_of(prefix: Path, suffix: str) -> Path:
    """Return the path of a data set's file."""
    return prefix.with_name(prefix.name + suffix)  # with_suffix would cut "web.v2"


def partial_of(prefix: Path, suffix: str) -> Path:
    """Return the path of a file until it is published."""
    return file_of(prefix, suffix + ".partial")


def output_problems(prefix: Path, inputs: Sequence[str], *, overwrite: bool) -> list[str]:
    """Return why `prefix` cannot be written to, given `inputs`, one sentence per problem."""
    if is_stored(prefix):
        return [f"--output {prefix} is in an object store: write to a folder, and copy the files"]
    if prefix.suffix in (".bin", ".idx"):
        return [f"--output {prefix} must be a prefix: leave {prefix.suffix} off"]
    if problem := folder_problem(prefix.parent):
        return [f"--output {prefix} {problem}"]
    written = {file_of(prefix, s).resolve() for s in FILES}
    problems = [
        f"--output {prefix} would write into the input {i}: choose another folder"
        for i in map(Path, inputs)
        # the next run would read this run's output in the folder as documents
        if i.resolve() in written or (i.is_dir() and prefix.resolve().is_relative_to(i.resolve()))
    ]
    if problems:
        return problems
    existing = [str(f) for f in (file_of(prefix, s) for s in FILES) if f.exists()]
    if existing and not overwrite:
        return [f"{', '.join(existing)} exist: pass --overwrite, or another --output"]
    return []


@contextmanager
def writing(*prefixes: Path) -> Iterator[None]:
    """Lock data sets for this run, and remove their partial files at the end."""
    # After a signal or a kill they stay; the first data set has the record of progress.
    first = prefixes[0]
    with saying(f"--output {first}"), ExitStack() as locks:
        first.parent.mkdir(parents=True, exist_ok=True)
        for prefix in prefixes:
            locks.enter_context(locked(file_of(prefix, ".lock"), prefix))
        try:
            yield
        except BaseException as stop:
            if not isinstance(stop, KeyboardInterrupt) or not partial_of(first, PROGRESS).exists():
                clear_partial(*prefixes)
            elif isinstance(stop, Signalled):
                stop.kept = "; the same command continues from the written files"
            raise
        else:
            clear_partial(*prefixes)


def clear_partial(*prefixes: Path) -> None:
    """Remove the partial files of an unsuccessful run."""
    for prefix in prefixes:
        for suffix in _PARTIAL:
            partial_of(prefix, suffix).unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a whole file, in hexadecimal; reads it in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sidecar(prefix: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write and return the metadata of a data set whose other files are complete."""
    checksums = {suffix: checksum(partial_of(prefix, suffix)) for suffix in FILES[1:]}
    content = content | {CHECKSUMS: checksums}
    path = partial_of(prefix, ".json")
    path.unlink(missing_ok=True)  # never write through a link
    path.write_text(json.dumps(content, indent=2) + "\n")
    return content


def publish(prefix: Path) -> None:
    """Replace the data set of `prefix` by its partial files; call inside `writing`."""
    for suffix in FILES:
        with partial_of(prefix, suffix).open("rb") as file:
            sync(file)
    # Before replacing the old .bin, so that its .idx never describes the new one.
    file_of(prefix, ".idx").unlink(missing_ok=True)
    # Megatron caches sample indices by prefix, regardless of the content.
    for cache in prefix.glob("cache/*Dataset_indices"):
        shutil.rmtree(cache, ignore_errors=True)
    for suffix in FILES:
        partial_of(prefix, suffix).rename(file_of(prefix, suffix))
    sync_folder(prefix.parent)


def mismatch(prefix: str, sha256: str, name: str) -> str | None:
    """Return why a data set does not match the tokenizer `name`; None if it does, or is unknown."""
    sidecar = Path(f"{prefix}.json")
    if not sidecar.exists():
        return None  # made by Megatron's own tool
    tokenizer = read_sidecar(prefix).get("tokenizer")
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("sha256"), str):
        return f"{sidecar} does not describe a data set: run megasink data again"
    if tokenizer["sha256"] == sha256:
        return None
    return (
        f"it was made with the tokenizer {tokenizer.get('folder')}, whose tokens differ from "
        f"those of {name}: train with that tokenizer or make the data set again"
    )


def read_sidecar(prefix: str) -> dict[str, Any]:
    """Return the sidecar's contents; empty if it is missing, or not a sidecar."""
    try:
        return read_object(Path(f"{prefix}.json"))
    except UserError:
        return {}


WHOLE = 100_000_000
"""Every start reads files of up to this many bytes in full."""
_BLOCKS, _BLOCK = 64, 1 << 12  # samples of a larger file
_DIGITS = 16  # of 64 hexadecimal ones: enough to tell copies apart


def contents(prefix: str, suffix: str, most: int = WHOLE) -> tuple[str, bool]:
    """Describe a data set's file for comparison with a copy, and say whether it was read whole."""
    # A file of at most `most` bytes is, and must be the one of PREFIX.json; of others samples are.
    path = Path(prefix + suffix)
    size = path.stat().st_size
    checksums = read_sidecar(prefix).get(CHECKSUMS)
    recorded = checksums.get(suffix) if isinstance(checksums, dict) else None
    stated = printable(str(recorded))[:_DIGITS]
    if size > most:
        more = f", sha256 {stated} according to its .json" if recorded else ""
        return f"{size:,} bytes, samples {_sampled(path, size)}{more}", False
    found = checksum(path)
    if recorded not in (None, found):
        raise UserError(
            f"{path} has the SHA-256 {found[:_DIGITS]}, but {prefix}.json says {stated}: copy the "
            "data set again, or make it again"
        )
    return f"{size:,} bytes, sha256 {found[:_DIGITS]}", True


def _sampled(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for number in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK) * number // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:_DIGITS]


KEY = "validation"
"""Key of PREFIX.json for the validation share, its seed and the name of the other data set."""


@dataclass(frozen=True)
class Validation:
    """A share, above 0 and at most 0.5, of the documents, drawn at random by a seed."""

    # One of every 1 / share consecutive documents, by the seed and its number in its part.

    share: float
    seed: int = 1234

    def has(self, number: int, part: int = 1) -> bool:
        """Return whether a document, by its number from 0 in a part of --partition, is drawn."""
        over, under = _ratio(self.share)
        blocks = {number * over // under, (number + 1) * over // under}
        return any(_drawn(self, part, block) == number for block in blocks)


@lru_cache
def _ratio(share: float) -> tuple[int, int]:
    return Fraction(str(share)).as_integer_ratio()


@lru_cache
def _drawn(validation: Validation, part: int, block: int) -> int:
    """Return the number of the document drawn from a block."""
    digest = hashlib.sha256(f"{validation.seed} {part} {block}".encode()).digest()
    place = Fraction(int.from_bytes(digest[:4], "big"), 1 << 32)
    return int((block + place) / Fraction(*_ratio(validation.share)))


def validation_of(prefix: Path) -> Path:
    """Return PREFIX-validation; for a part PREFIX-1-of-8, PREFIX-validation-1-of-8."""
    return prefix.with_name(re.sub(r"(-\d+-of-\d+)?$", r"-validation\1", prefix.name, count=1))


def record_of(validation: Validation, prefix: Path, *, is_part: bool) -> dict[str, Any]:
    """Return the entry of PREFIX.json, the same in every part."""
    name = validation_of(prefix).name
    name = re.sub(r"-\d+-of-\d+$", "", name) if is_part else name
    return {KEY: asdict(validation) | {"data": name}}


def recorded_validation(prefix: str) -> str | None:
    """Return the prefix of the validation documents that PREFIX.json names; None without any."""
    record = read_sidecar(prefix).get(KEY)
    name = record.get("data") if isinstance(record, dict) else None
    is_name = isinstance(name, str) and Path(name).name == name  # beside it, nowhere else
    return str(Path(prefix).with_name(str(name))) if is_name else None
