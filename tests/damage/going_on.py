"""Damaged files that commands go on from, and results that a page is made of.

The folders are those of commands that ended before their results were written.
"""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.damage.fields import VALUES
from tests.damage.folders import DEEP, Edit, cut, pipe, write
from tests.damage.harness import Case, Sound
from tests.damage.sound import FLAGS, line_of

_FIELDS = 3 * len(VALUES)


def _case(command: str, edit: Edit, code: int | None = 2) -> Case:
    def make(folder: Path, sound: Sound) -> list[str]:
        shutil.copytree(sound.unfinished(command), folder / "there")
        edit(folder / "there")
        return line_of(command, sound, folder / "there")

    return Case(make, code, writes=True)


def _first(pattern: str, edit: Callable[[str], Edit]) -> Edit:
    """Damage the first file of a name."""
    return lambda folder: edit(_named(folder, pattern))(folder)


def _named(folder: Path, pattern: str) -> str:
    return str(min(folder.rglob(pattern)).relative_to(folder))


def _flipped(name: str) -> Edit:
    def edit(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        for at in range(60, len(content), 97):
            content[at] ^= 0x41
        (folder / name).write_bytes(content)

    return edit


def _arrays(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], Edit]:
    """Write a sound archive of other arrays."""

    def of(name: str) -> Edit:
        def edit(folder: Path) -> None:
            with np.load(folder / name) as file:
                arrays = {key: file[key] for key in file.files}
            out = io.BytesIO()
            np.savez(out, **change(arrays))
            (folder / name).write_bytes(out.getvalue())

        return edit

    return of


def _swapped(pattern: str) -> Edit:
    """Put one file of a name in the place of another."""

    def edit(folder: Path) -> None:
        one, other, *_ = sorted(folder.rglob(pattern))
        shutil.copyfile(other, one)

    return edit


def _fields(name: str, edit: Callable[[Any], Any]) -> Edit:
    def of(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))

    return of


def _places(value: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """Yield the keys to every entry of nested objects and lists, of a list to its first alone."""
    if isinstance(value, dict | list) and depth:
        entries = value.items() if isinstance(value, dict) else list(enumerate(value))[:1]
        for key, entry in entries:
            yield (key,)
            yield from ((key, *rest) for rest in _places(entry, depth - 1))


def _with(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    of = value
    for key in place[:-1]:
        of = of[key]
    of[place[-1]] = new
    return value


def _one_field(pattern: str, number: int) -> Edit:
    """Damage one of the fields, by `VALUES` in turn."""

    def edit(folder: Path) -> None:
        name = _named(folder, pattern)
        places = list(_places(json.loads((folder / name).read_text())))
        place, kind = places[number * len(places) // _FIELDS], list(VALUES)[number % len(VALUES)]
        _fields(name, lambda value: _with(value, place, VALUES[kind]))(folder)

    return edit


def _files(command: str, pattern: str, *, arrays: bool) -> Iterator[tuple[str, Case]]:
    what = pattern.replace("*", "x").replace("/", "-")
    edits: dict[str, Callable[[str], Edit]] = {
        "empty": lambda name: write(name, b""),
        "text": lambda name: write(name, b"no results"),
        "bytes": lambda name: write(name, b"\xff\xfe\0"),
        "cut": lambda name: cut(name, 100),
        "pipe": pipe,
    }
    if arrays:
        edits |= {
            "flipped": _flipped,
            "half": _arrays(lambda a: {k: v[: len(v) // 2] if v.ndim else v for k, v in a.items()}),
            "nan": _arrays(
                lambda a: {k: v * np.nan if v.dtype == float else v for k, v in a.items()}
            ),
            "none": _arrays(lambda a: {}),
            "words": _arrays(lambda a: dict.fromkeys(a, np.asarray("x"))),
        }
    else:
        edits |= {
            "deep": lambda name: write(name, DEEP),
            "list": lambda name: write(name, b"[]"),
            "number": lambda name: write(name, b"3"),
        }
    for damage, of in edits.items():
        # What is no file is not there, and is measured again.
        code = None if damage == "pipe" else 2
        yield f"{what}-{damage}/{command}", _case(command, _first(pattern, of), code)


def _all() -> Iterator[tuple[str, Case]]:
    for command, pattern, arrays in (
        ("analyze", "partial/shard_*.npz", True),
        ("analyze", "partial/analysis.json", False),
        ("ablate", "points/*.json", False),
        ("ablate", "points/scores-*/shard_*.npz", True),
        ("ablate", "points/scores-*/analysis.json", False),
        ("ablate", "points/*.npz", True),
        ("sweep", "partial/*/shard_*.npz", True),
        ("sweep", "partial/*/analysis.json", False),
        *((command, "settings.json", False) for command in FLAGS),
    ):
        yield from _files(command, pattern, arrays=arrays)
    for number in range(_FIELDS):
        yield f"field-{number}/ablate", _case("ablate", _one_field("points/*.json", number))
        yield f"field-{number}/report", _report(_one_field("results.json", number))
    yield "points-swapped/ablate", _case("ablate", _swapped("points/*.json"))
    yield "shards-swapped/sweep", _case("sweep", _swapped("partial/*/shard_*.npz"))


def _report(edit: Edit) -> Case:
    """A page of an analysis; what can be meant may be taken."""

    def make(folder: Path, sound: Sound) -> list[str]:
        shutil.copytree(sound.analysis, folder / "analysis")
        edit(folder / "analysis")
        return ["report", str(folder / "analysis"), "--output", "{out}"]

    return Case(make, None)


CASES = dict(_all())
