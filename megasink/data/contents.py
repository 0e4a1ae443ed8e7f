"""Describe the bytes of a data set's files, so that copies can be compared."""

import hashlib
from pathlib import Path

from megasink.console.printable import printable
from megasink.data.output import CHECKSUMS, checksum, read_sidecar
from megasink.errors import UserError

WHOLE = 100_000_000
"""Bytes of a file that every start reads whole."""
_BLOCKS, _BLOCK = 64, 1 << 12  # samples of a larger file
_DIGITS = 16  # of 64 hexadecimal ones: enough to tell copies apart


def contents(prefix: str, suffix: str, most: int = WHOLE) -> tuple[str, bool]:
    """Describe a data set's file for comparison with a copy, and return whether it was read whole.

    A file of at most `most` bytes is read whole, and refused if PREFIX.json describes another. For
    a larger one, use the size, 64 blocks and the checksum in PREFIX.json.
    """
    path = Path(prefix + suffix)
    size = path.stat().st_size
    checksums = read_sidecar(prefix).get(CHECKSUMS)
    recorded = checksums.get(suffix) if isinstance(checksums, dict) else None
    stated = printable(str(recorded))[:_DIGITS]
    if size > most:
        more = f", sha256 {stated} by its .json" if recorded else ""
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
