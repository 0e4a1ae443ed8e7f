"""The shards of an analysis, and the folder where those lie that are done.

A shard is a few batches. What was measured of it is written into OUTPUT/partial when it has run, so
that an analysis that is killed goes on where it stopped, and several processes can share one.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.probe.inputs import Sample
from megasink.probe.measurements import ShardMeasurements

MOST = 64
"""Shards of an analysis at most: each holds the sums of `MeanCosine`, however few its samples."""

Shard = list[list[int]]
"""Indices of samples, by batch."""


def plan(samples: Sequence[Sample], batch_size: int) -> list[Shard]:
    """Cut samples into batches of one length, shortest first, and batches into shards.

    Depends on nothing else, so that every process, now and after a restart, has the same plan.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    least = max(batch_size, -(-len(samples) // MOST))
    shards: list[Shard] = []
    room = 0
    for batch in _batches(order, samples, batch_size):
        if room <= 0:
            shards.append([])
            room = least
        shards[-1].append(batch)
        room -= len(batch)
    return shards


def _batches(order: list[int], samples: Sequence[Sample], batch_size: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in order:
        if batch and (
            len(batch) == batch_size or len(samples[batch[0]].tokens) != len(samples[index].tokens)
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class PartialFolder:
    """The shards of an analysis that is not finished.

    Args:
        folder: OUTPUT/partial.
        identity: whatever the shards depend on: of another one they are not taken.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self._folder = folder
        self._identity = json.loads(json.dumps(identity))

    def open(self, count: int) -> int:
        """Make the folder, or take over what a killed analysis left; by one process.

        Args:
            count: of the shards.

        Returns:
            how many of them are there.

        Raises:
            UserError: the folder cannot be written, or holds another analysis.
        """
        path = self._folder / "analysis.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                self._compare(json.loads(path.read_text()))
            else:
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(self._identity, indent=1))
                partial.replace(path)
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}): delete {self._folder}") from error
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        return sum(self.has(number) for number in range(count))

    def check_shared(self) -> None:
        """Raise UserError where another process does not see what the first one wrote."""
        if not (self._folder / "analysis.json").is_file():
            raise UserError(
                f"--output: {self._folder} is not there on every machine: name a folder that all "
                "of them share"
            )

    def has(self, number: int) -> bool:
        """Whether a shard is done."""
        return self._path(number).is_file()

    def write(self, number: int, measured: ShardMeasurements) -> None:
        """Keep a shard.

        Raises:
            UserError: the disk is full, or the like; the shards before are kept.
        """
        try:
            measured.save(self._path(number))
        except OSError as error:
            raise _cannot_write(self._folder, error) from error

    def read(self, count: int) -> Iterator[ShardMeasurements]:
        """All of them, in order.

        Raises:
            UserError: one cannot be read.
        """
        for number in range(count):
            yield ShardMeasurements.load(self._path(number))

    def remove(self) -> None:
        """Delete the folder: the results are written."""
        shutil.rmtree(self._folder)

    def _path(self, number: int) -> Path:
        return self._folder / f"shard_{number:05d}.npz"

    def _compare(self, before: dict[str, Any]) -> None:
        different = [
            f"{key} {_short(before.get(key))} -> {_short(value)}"
            for key, value in self._identity.items()
            if before.get(key) != value
        ]
        if different:
            raise UserError(
                f"{self._folder} holds an unfinished analysis of another kind "
                f"({'; '.join(different)}): repeat the command that began it, delete the folder, "
                "or choose another --output"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder} cannot be written ({error.strerror or error}): make room or choose another "
        "--output; what has been measured so far is kept, and the same command goes on from there"
    )
