"""Measured points, each in a file named by a hash of its settings.

A killed, repeated or extended sweep finds the existing points, whoever measured them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.measurements import MeasuredSample
from megasink.analysis.capture.shards import check_shared, writing_parts
from megasink.analysis.stored import read_arrays, read_sealed, write_arrays, write_object
from megasink.errors import UserError
from megasink.files.checked_fields import from_json, to_json

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class TaskScore:
    """The result of one task of lm-eval."""

    metric: str  # its name there
    version: str  # of the task
    # value, standard_error: in percent; the error is that of the value alone, by lm-eval.
    value: float | None
    standard_error: float | None
    samples: int  # number of questions
    # The metric of each question, in order, so that points can be compared in pairs; empty for a
    # group of tasks.
    of_each: list[float]


@dataclass(kw_only=True)
class MeasuredPoint:
    """Contents of one file of the folder points."""

    facts: dict[str, Any]  # everything that the point depends on; its hash is the file's name
    # Share of the model's heads that were zeroed (P3.13), and `zeroed_LH` the share of samples in
    # which each head was; null if the intervention does not count them.
    zeroed: float | None
    zeroed_LH: list[list[float | None]] | None
    texts: list[MeasuredSample]  # each text with its loss, in order, null if infinite or NaN
    tasks: dict[str, TaskScore]  # task -> its result. One of them is empty.


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def texts_hash(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 of the token ids, the scored targets and the dataset of all samples."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr((sample.tokens, sample.scored, sample.dataset)).encode())
    return digest.hexdigest()


class PointFolder:
    """OUTPUT/points: a point in each .json, and arrays in each .npz; all sealed (`sealed`)."""

    def __init__(self, folder: Path):
        self._folder = folder

    def open(self) -> None:
        """Create the folder."""
        with writing_parts(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def check_shared(self) -> None:
        """Raise UserError if another process does not see the files of the first one."""
        check_shared(self._folder)

    def path(self, name: str) -> Path:
        """Return the path of a point or array."""
        return self._folder / name

    def has(self, name: str) -> bool:
        """Return whether a file is written."""
        return self.path(name).is_file()

    def write(self, key: str, point: MeasuredPoint) -> None:
        """Write a point."""
        with writing_parts(self._folder):
            write_object(self.path(f"{key}.json"), to_json(point), key)

    def read(self, key: str) -> MeasuredPoint:
        """Read a point."""
        path = self.path(f"{key}.json")
        try:
            point: MeasuredPoint = from_json(MeasuredPoint, read_sealed(path, key), str(path))
        except UserError as error:
            raise UserError(f"{error}: delete the file to measure this point again") from error
        return point

    def arrays(self, key: str, make: Callable[[], Mapping[str, Floats]]) -> dict[str, Floats]:
        """Return the arrays of this name; compute and write them if they are missing."""
        if not self.has(f"{key}.npz"):
            made = make()
            with writing_parts(self._folder):
                write_arrays(self.path(f"{key}.npz"), made, key)
        return read_arrays(self.path(f"{key}.npz"), "delete it, and it is measured again", key)
