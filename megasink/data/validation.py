"""Draw the documents of a corpus that go into a second data set, for validation."""

import hashlib
import re
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from megasink.data.output import read_sidecar

KEY = "validation"
"""Key of PREFIX.json: share, seed and data, the name of the other data set beside it."""


@dataclass(frozen=True)
class Validation:
    """A share, above 0 and at most 0.5, of the documents, drawn at random by a seed.

    One of every 1 / share consecutive documents is drawn, so each region of the corpus gives its
    share. A draw depends only on the seed and the number of the document in its part.
    """

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
