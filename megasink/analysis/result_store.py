"""The files of a command: parts, which a repeated command takes over, and results.

A part is sealed with the SHA-256 of its contents and of its measurement's identity. A part that was
damaged, cut, edited or copied from elsewhere is refused before anything is computed with it.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from megasink.analysis.options import AnalysisOptions
from megasink.analysis.ranks import Ranks
from megasink.console.printable import printable
from megasink.console.progress import progress
from megasink.errors import UserError
from megasink.files.atomic import atomic_file, atomic_files, atomic_text, remove
from megasink.files.checked_fields import to_json
from megasink.files.json_file import read_object
from megasink.files.output_folder import differences, results_in
from megasink.files.system_errors import writing

PAGE_FILES = ("report.html", "figures/*.png", "figures/*.pdf")
# Prefixes that spreadsheets read as the start of a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_SEAL = "sha256"
_BROKEN = "its contents have changed since it was written"
_AGAIN = "delete it and repeat the command to measure again"
_FULL = (
    "free some space or choose another --output; finished parts are kept, and the same command "
    "resumes from them"
)


class Store:
    """The parts of a measurement by name: arrays in .npz, objects in .json; without a folder kept.

    A folder refuses parts of another identity. Without one, names are hashes of what a part needs.
    """

    def __init__(
        self,
        folder: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        *,
        overwrite: bool = False,
    ):
        self.folder, self._overwrite = folder, overwrite
        self.ranks = ranks or Ranks()  # the processes that share the parts
        self._identity = json.loads(json.dumps(identity))
        self._kept: dict[str, dict[str, Any]] = {}
        self._made = False

    def has(self, name: str) -> bool:
        """Return whether a part is finished."""
        return name in self._kept if self.folder is None else (self.folder / name).is_file()

    def write(self, name: str, part: Mapping[str, Any]) -> None:
        """Keep a part."""
        if self.folder is None:
            self._kept[name] = dict(part)
            return
        with writing(self.folder, _FULL):
            self.folder.mkdir(parents=True, exist_ok=True)
            if name.endswith(".npz"):
                write_arrays(self.folder / name, part, self._of(name))
            else:
                seal = key_of([self._of(name), part])
                atomic_text(self.folder / name, json.dumps({_SEAL: seal, **part}, indent=1))

    def read(self, name: str) -> dict[str, Any]:
        """Return a part."""
        if self.folder is None:
            return dict(self._kept[name])
        path = self.folder / name
        if name.endswith(".npz"):
            return read_arrays(path, _AGAIN, self._of(name))
        try:
            part = read_object(path)
        except UserError as error:
            raise UserError(f"{error}: {_AGAIN}") from error
        if part.pop(_SEAL, None) != key_of([self._of(name), part]):
            raise UserError(f"{path} is damaged ({_BROKEN}): {_AGAIN}")
        return part

    def fill(
        self,
        parts: Mapping[str, int],
        make: Callable[[int, Callable[..., None]], Mapping[str, Any]],
        *,
        verb: str,
        unit: str,
        console: Console | None = None,
        slow: bool = False,
        everywhere: bool = False,
    ) -> bool:
        """Make the missing parts; return whether to go on: on rank 0, or `everywhere`."""
        names, ranks = list(parts), self.ranks
        console = console or Console(stderr=True, quiet=bool(ranks.rank))
        if self.folder is not None:
            ranks.enter(str(self.folder))
        before = self._begin(parts, unit, console)
        bar = progress(verb, sum(parts.values()), unit, before=before, console=console, slow=slow)
        try:
            with bar as tell:

                def done(units: int, unfinished: float = 0.0) -> None:
                    tell(before + ranks.advance(units) + unfinished)

                for number in ranks.claims(len(names)):
                    if not self.has(names[number]):
                        part = make(number, done)
                        self.write(names[number], part)
                ranks.reach("measured")
                if ranks.rank and not everywhere:
                    return False
                ranks.wait("measured", ranks.size, lambda done: tell(before + done))
        except BaseException:
            # A new folder without parts would refuse the same command with the option that its
            # error asks for. With several processes another one may be about to write a part.
            if self._made and ranks.size == 1 and not any(map(self.has, names)):
                self.remove()
            raise
        return True

    def _begin(self, parts: Mapping[str, int], unit: str, console: Console) -> int:
        """Create the folder, or take over one of this identity; return the units that are done."""
        if self.ranks.rank:
            self.ranks.wait("opened", 1)
            self.check_shared()
            return 0
        if self.folder is not None:
            with writing(self.folder, _FULL):
                self._open(self.folder)
        there = [name for name in parts if self.has(name)]
        before = sum(parts[name] for name in there)
        self.ranks.reach("opened")
        if there:
            done = f"{len(there)} of {len(parts)} parts ({before} {unit}) are finished"
            console.print(f"resuming: {done}")
        return before

    def _open(self, folder: Path) -> None:
        path = folder / "analysis.json"
        self._made |= not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        if self._identity is None:
            return
        if not path.is_file():
            atomic_text(path, json.dumps(self._identity, indent=1))
            self._made = True
            return
        try:
            before = read_object(path)
        except UserError as error:
            raise UserError(f"{error}: delete {folder}") from error
        different = differences(before, self._identity)
        if different and self._overwrite:
            self.remove()
            self._open(folder)
        elif different:
            raise UserError(
                f"{folder} holds an unfinished analysis with other settings "
                f"({'; '.join(different)}): repeat the command that started it, replace it with "
                "--overwrite, or choose another --output"
            )

    def check_shared(self) -> None:
        """Raise UserError if this process does not see what the first one has created."""
        path = self.folder
        if path is not None and self._identity is not None:
            path /= "analysis.json"
        if path is not None and not path.exists():
            raise UserError(
                f"--output: {path} does not exist on every machine: use a shared folder"
            )

    def remove(self) -> None:
        """Delete every part."""
        self._kept.clear()
        if self.folder is not None:
            remove(self.folder)

    def _of(self, name: str) -> str:
        return f"{name} of {json.dumps(self._identity, sort_keys=True)}"


def holding(
    options: AnalysisOptions, command: str, about: Mapping[str, Any], ranks: Ranks
) -> AbstractContextManager[Callable[[], None]]:
    """Hold the output folder of a command, in the first process; see `results_in`."""
    assert options.output is not None
    return results_in(
        options.output,
        command,
        about,
        given=options.given() | {"--name": about["--name"]},
        overwrite=options.overwrite,
        grows=options.grows,
        writes=not ranks.rank,
    )


def write_results(
    output: Path, files: Mapping[str, Any], replaced: Collection[str] = (), *, kept: bool = True
) -> None:
    """Write files, which appear in `output` together; an empty one, and those `replaced`, go."""
    # `kept`: the measurements stay on disk until the results are written.
    then = ", which then writes the results without measuring again" * kept
    cure = f"free some space and repeat the command{then}"
    gone = (*replaced, *(name for name, content in files.items() if not content))
    with writing(f"--output {output}", cure), atomic_files(output, gone) as folder:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            if not content:
                continue
            if path.suffix == ".json":
                atomic_text(path, json.dumps(to_json(content), indent=1))
            elif path.suffix == ".npz":
                write_arrays(path, content)
            elif path.suffix == ".csv":
                write_csv(path, list(content[0]), content)
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows under their columns; numbers unchanged, text through :func:`text_cell`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writerow({name: text_cell(name) for name in columns})
        for row in rows:
            writer.writerow({name: text_cell(value) for name, value in row.items()})


def text_cell(value: Any) -> Any:
    """Return text without control characters, with an apostrophe before a would-be formula."""
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(_FORMULA) + printable(value, keep="")


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], of: str | None = None) -> None:
    """Write an .npz atomically, without pickles; sealed, if it is a part `of` a measurement."""
    with atomic_file(path) as file:
        if of is None:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        else:
            seal = np.asarray(_of_arrays(arrays, of))
            np.savez(file, allow_pickle=False, **{_SEAL: seal}, **arrays)


def read_arrays(path: Path, cure: str, of: str | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays that `write_arrays` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if of is not None and str(arrays.pop(_SEAL, None)) != _of_arrays(arrays, of):
            raise ValueError(_BROKEN)
    except Exception as error:  # numpy, zipfile and zlib raise nearly anything on a broken file
        raise UserError(f"{path} is damaged ({error or type(error).__name__}): {cure}") from error
    return arrays


def key_of(facts: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the SHA-256 of facts."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _of_arrays(arrays: Mapping[str, NDArray[Any]], of: str) -> str:
    digest = hashlib.sha256(of.encode())
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
