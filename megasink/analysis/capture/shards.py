"""The shards of an analysis, and the folder of finished ones.

A shard is a few batches. Its measurements are written to OUTPUT/partial once it has run, so that a
killed analysis resumes where it stopped, and several processes can share one.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megasink.analysis.capture.inputs import Sample, equal_lengths
from megasink.analysis.capture.measurements import ShardMeasurements
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object
from megasink.files.output_folder import differences
from megasink.files.system_errors import writing

MOST = 64
"""Maximum number of shards; each holds the sums of `MeanCosine`, however few its samples."""

Shard = list[list[int]]
"""Sample indices by batch."""


def plan(samples: Sequence[Sample], batch_size: int) -> list[Shard]:
    """Cut samples into batches of one length, shortest first, and batches into shards.

    The plan depends on nothing else, so every process has the same one, also after a restart.
    """

    def length(i: int) -> int:
        return len(samples[i].tokens)

    least = max(batch_size, -(-len(samples) // MOST))
    shards: list[Shard] = []
    room = 0
    order = sorted(range(len(samples)), key=length)
    for batch in equal_lengths(order, length, batch_size):
        if room <= 0:
            shards.append([])
            room = least
        shards[-1].append(list(batch))
        room -= len(batch)
    return shards


class PartialFolder:
    """The shards of an unfinished analysis; those of another identity are refused or deleted."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, overwrite: bool = False):
        self._folder, self._overwrite = folder, overwrite
        self._identity = json.loads(json.dumps(identity))
        self._made = False

    def open(self, count: int) -> int:
        """Create the folder, or take over one; return the number of finished shards."""
        path = self._folder / "analysis.json"
        with writing_parts(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                try:
                    before = read_object(path)
                except UserError as error:
                    raise UserError(f"{error}: delete {self._folder}") from error
                self._compare(before)
            else:
                atomic_text(path, json.dumps(self._identity, indent=1))
                self._made = True
        return sum(self.has(number) for number in range(count))

    def check_shared(self) -> None:
        """Raise UserError if another process does not see the first one's files."""
        check_shared(self._folder / "analysis.json")

    def has(self, number: int) -> bool:
        """Return whether a shard is finished."""
        return self._path(number).is_file()

    def write(self, number: int, measured: ShardMeasurements) -> None:
        """Write a shard."""
        with writing_parts(self._folder):
            measured.save(self._path(number), self._of(number))

    def read(self, count: int) -> Iterator[ShardMeasurements]:
        """Yield all shards in order."""
        for number in range(count):
            yield ShardMeasurements.load(self._path(number), self._of(number))

    def discard(self) -> None:
        """Delete the folder if this process made it and it holds no shard."""
        if self._made and not any(self._folder.glob("shard_*")):
            self.remove()

    def remove(self) -> None:
        """Delete the folder once the results are written."""
        shutil.rmtree(self._folder)

    def _of(self, number: int) -> str:
        return f"{number} of {json.dumps(self._identity, sort_keys=True)}"

    def _path(self, number: int) -> Path:
        return self._folder / f"shard_{number:05d}.npz"

    def _compare(self, before: dict[str, Any]) -> None:
        different = differences(before, self._identity)
        if different and self._overwrite:
            self.remove()
            self.open(0)
        elif different:
            raise UserError(
                f"{self._folder} holds an unfinished analysis with other settings "
                f"({'; '.join(different)}): repeat the command that started it, replace it with "
                "--overwrite, or choose another --output"
            )


def check_shared(path: Path) -> None:
    """Check that this process sees another one's files."""
    if not path.exists():
        raise UserError(f"--output: {path} does not exist on every machine: use a shared folder")


def writing_parts(folder: Path) -> AbstractContextManager[None]:
    """Raise UserError instead of an OSError while a finished part is written to a folder."""
    return writing(
        folder,
        "free some space or choose another --output; finished parts are kept, and the same "
        "command resumes from them",
    )
