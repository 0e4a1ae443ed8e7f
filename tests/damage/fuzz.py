"""Crafted files of every kind that commands read, by seed: one line, no traceback, no hang.

Each case takes a sound file and one of the changes below at places that its number chooses: strange
files (a pipe, a device, a folder, a link to itself), bytes (cut, flipped, repeated, not UTF-8),
and fields of JSON (other types, huge numbers, NaN, nesting). Code that ran would leave a mark.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.damage.fields import VALUES
from tests.damage.folders import DEEP
from tests.damage.harness import Case, Sound
from tests.damage.sound import training

Change = Callable[[Path, random.Random], None]
_MORE = ["", "../../x", {"x": [1]}, [None], [1], -(10**30), 1e308, "\x1b[31m", {"a": {"b": []}}]


def _pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size or 1))


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3, 40))):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _head(path: Path, rng: random.Random) -> None:
    """Flip a bit near the start, where formats have their sizes."""
    content = bytearray(path.read_bytes())
    if content:
        content[rng.randrange(min(len(content), 64))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _repeat(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content) or 1)
    path.write_bytes(content[:at] + content[at // 2 :])


def _bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"", b"\xff\xfe\0", b"\0" * 5000, DEEP, b"[]", b"3", b"null")))


def _field(path: Path, rng: random.Random) -> None:
    """Set a field of one of the lines of JSON, at any depth."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = rng.randrange(len(lines))
    content = json.loads(lines[at])
    part: Any = content
    while isinstance(part, dict | list) and part:
        key = rng.choice(list(part)) if isinstance(part, dict) else rng.randrange(len(part))
        if not (isinstance(part[key], dict | list) and part[key]) or rng.random() < 0.3:
            part[key] = rng.choice([*VALUES.values(), *_MORE])
            break
        part = part[key]
    lines[at] = json.dumps(content)
    path.write_text("\n".join(lines) + "\n")


def _pickle(path: Path, rng: random.Random) -> None:
    """Put other values into the pickle of a checkpoint's index, a class for a class."""
    content = path.read_bytes()
    marks = [b"K\x01", b"K\x00", b"M\x10", b"\x85", b"\x86", b"N", b"\x88", b"]", b"}", b"("]
    old = rng.choice([mark for mark in marks if mark in content])
    at = [i for i in range(len(content)) if content.startswith(old, i)]
    place = rng.choice(at)
    new = rng.choice([b"N", b"\x88", b"]", b"}", b"\x8c\x01x", b"K\xff", b"G\x7f\xf8" + bytes(6)])
    path.write_bytes(content[:place] + new + content[place + len(old) :])


_STRANGE = (_pipe, _device, _folder, _circle)
_RAW = (_cut, _flip, _head, _repeat, _bytes)
_TEXT = (*_STRANGE, *_RAW, _field, _field, _field, _field)
_RUN = ("config.json", "metrics.jsonl", "starts.jsonl", "config.toml")
_NEWEST = "checkpoints/iter_0000002"
_CHECKPOINT = (
    ".metadata",
    "metadata.json",
    "common.pt",
    "__0_0.distcp",
    "../latest_checkpointed_iteration.txt",
)
_HF = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)


def _changes(name: str) -> tuple[Change, ...]:
    if name == ".metadata":
        return (*_STRANGE, *_RAW, _flip, _flip, _pickle, _pickle, _pickle, _pickle)
    return _TEXT if name.endswith((".json", ".jsonl")) else (*_STRANGE, *_RAW)


def _case(of: str, name: str, line: Callable[[Path, Sound], list[Any]], seed: int) -> Case:
    """A command on a copy of something sound, in which one file is changed."""

    def make(folder: Path, sound: Sound) -> list[str]:
        rng, copy = random.Random(seed), folder / "copy"
        source = {"run": sound.run, "hf": sound.hf, "analysis": sound.analysis}.get(of)
        if source is None:
            copy.mkdir()
            for suffix in (".bin", ".idx", ".json"):
                shutil.copy(sound.data.with_name(f"text{suffix}"), copy)
        else:
            ignore = shutil.ignore_patterns("data-cache", "tensorboard", "logs", "figures")
            shutil.copytree(source, copy, ignore=ignore)
        if of == "run" and "/" in name:
            shutil.rmtree(copy / "checkpoints" / "iter_0000001", ignore_errors=True)
        if name == "lease/owner.json":
            (copy / "lease").mkdir()
            (copy / name).write_text(json.dumps({"host": "h", "pid": 7, "started": 9, "boot": ""}))
        path = copy / name
        if not path.exists():
            path.write_text(json.dumps({"chat_template": [{"name": "x", "template": "y"}]}))
        rng.choice(_changes(path.name))(path, rng)
        if name == "lease/owner.json" and path.is_file() and not path.is_symlink():
            os.utime(path, (1, 1))  # of another host, which was not seen for long
        return [str(word) for word in line(copy, sound)]

    # A run that is resumed is written to, and a reader may take what it does not compute with.
    return Case(make, None, writes=True)


def _lines() -> Iterator[tuple[str, str, Callable[[Path, Sound], list[Any]]]]:
    """Yield what is copied, the changed file, and the command that reads it."""

    def with_data(copy: Path, sound: Sound) -> list[Any]:
        return ["--data", sound.root / "texts.jsonl", "--device", "cpu", "--max-samples", 1]

    def resume(copy: Path, sound: Sound) -> list[Any]:
        flags = ["--run-dir", copy, "--data-path", sound.data, "--resume"]
        return training(sound, *map(str, flags), "--override-opt-param-scheduler", iterations=3)

    def convert(copy: Path, sound: Sound) -> list[Any]:
        return ["convert-from-hf", copy, "--output", "{out}", "--no-verify"]

    def export(copy: Path, sound: Sound) -> list[Any]:
        return [
            "convert-to-hf",
            copy,
            "--output",
            "{out}",
            "--no-verify",
            "--tokenizer",
            sound.tokenizer,
        ]

    def generate(copy: Path, sound: Sound) -> list[Any]:
        return ["generate", copy, "--prompt", "Text", "--max-new-tokens", 1, "--device", "cpu"]

    for name in _HF:
        yield "hf", name, convert
        yield "hf", name, lambda c, s: ["analyze", c, *with_data(c, s), "--output", "{out}"]
    yield (
        "hf",
        "tokenizer_config.json",
        lambda c, s: [
            *("data", s.root / "texts.jsonl", "--output", "{out}/text", "--tokenizer", c),
            *("--workers", 1),
        ],
    )
    for name in (*_RUN, *(f"{_NEWEST}/{file}" for file in _CHECKPOINT), "lease/owner.json"):
        yield "run", name, resume
        yield "run", name, lambda c, s: ["checkpoints", c, "--verify"]
        yield "run", name, lambda c, s: ["recipes", c]
        yield "run", name, lambda c, s: ["compare", c]
    for name in ("config.json", *(f"{_NEWEST}/{file}" for file in _CHECKPOINT)):
        yield "run", name, export
        yield "run", name, generate
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield "run", f"tokenizer/{name}", generate
    for name in ("results.json", "samples.npz", "settings.json"):
        yield "analysis", name, lambda c, s: ["report", c, s.analysis, "--output", "{out}"]
        yield "analysis", name, lambda c, s: ["report", c, "--output", c]
    for name in ("text.bin", "text.idx", "text.json"):
        yield (
            "data",
            name,
            lambda c, s: training(s, "--data-path", str(c / "text"), "--data-cache-path", "{out}"),
        )


PER_LINE = 7


def _all() -> Iterator[tuple[str, Case]]:
    for number, (of, name, line) in enumerate(_lines()):
        for turn in range(PER_LINE):
            seed = 1000 * number + turn
            yield f"{of}/{name}/{seed}", _case(of, name, line, seed)


CASES = dict(_all())
