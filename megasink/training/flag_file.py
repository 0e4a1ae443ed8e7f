"""Flags in files: their form in TOML, and the flags that a file may set.

One rule holds for every file: a run's starts.jsonl and config.toml, a recipe, a grid and its
measurements, flags.txt of a conversion. They set the model, its inputs and the training: switches,
numbers, names of choices, and listed text (options.megatron_flags). Only the command line may set
flags that write elsewhere, import, connect or send (`refused`).
"""

import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megasink.data.dataset_files import is_stored
from megasink.errors import UserError
from megasink.files.json_file import read_text
from megasink.options.megatron_flags import CHOICES, REFUSED, having
from megasink.options.run_options import OPTIONS

Flags = dict[str, Any]
"""Flags of `megasink train` by flat name: a number, a string, true, false or a list."""
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
# The name of a choice, which argparse or a check validates.
_WORD = r"[A-Za-z0-9][\w.-]*"
_FORM = r"[\w ,.:;*+()|\[\]-]*"  # of text that only describes
# As megatron_flags.KNOWN: options of megasink, and of the commands that a grid measures with.
_OWN = {
    "read": "expanded-recipe calibration data heads interventions tokenizer".split(),
    "written": ["output"],
    "text": "attention-kernel attention-variant attention-variant-layers "
    "replace-tokens-with device json-key name".split(),
    "name": "replace-tokens-at batch-size bos dtype maps score tasks zeroed".split(),
}
# Switches, and the options of a start, which no file sets.
_NEVER = {name.replace("_", "-") for name, *_ in REFUSED["in a file"]}
_NEVER |= {"plugin", "run-dir", "recipe"}
_NEVER |= {"allow-download", "confirm-run-unsafe-code", "task-folder"}  # of those commands


@functools.cache
def _text_flags() -> dict[str, str]:
    """Return {flag without dashes: "read", "written", "text" or "name"} of all text in a file."""
    own = (field for options in OPTIONS for field in fields(options))
    choices = (field.name for field in own if "choices" in field.metadata)
    kinds = {name.replace("_", "-"): "name" for name in (*choices, *CHOICES)}
    for kind in ("read", "written", "text"):
        kinds |= {name.replace("_", "-"): kind for name in having(kind)}
    return kinds | {name: kind for kind, names in _OWN.items() for name in names}


def refused(words: Sequence[str], folder: Path | None = None) -> dict[str, str]:
    """Return a file's flags that only the command line may set; `folder` may be written."""
    return {
        name: " ".join([f"--{name}", *values])
        for name, values in named_values(words)
        if not _harmless(name, values, folder)
    }


def _harmless(name: str, values: Sequence[str], folder: Path | None) -> bool:
    if not name or name in _NEVER:
        return False
    kind = _text_flags().get(name)
    if kind == "read":
        return not any(map(is_stored, values))  # connecting to a store
    if kind == "written":
        inside = folder and folder.resolve()
        return all(inside and Path(value).resolve().is_relative_to(inside) for value in values)
    form = {"text": _FORM, "name": f"{_NUMBER}|{_WORD}"}.get(kind or "", _NUMBER)
    return all(re.fullmatch(form, value) for value in values)


def named_values(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name without dashes, values) per flag; leading values have an empty name."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name or values:
                yield name, values
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    if name or values:
        yield name, values


def given_device(words: Sequence[str]) -> str | None:
    """Return the value of --device, before anything is parsed."""
    return next(iter(dict(named_values(words)).get("device", ())), None)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as words of a command line; false leaves a flag out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def form_problems(name: str, value: Any) -> Iterator[str]:
    """Yield the problems of a flag's form in a file; each continues the flag's name."""
    if name.startswith("-"):
        yield f": write {name.lstrip('-')}, without dashes"
    elif not re.fullmatch(r"\w[\w.-]*", name):
        yield " is not the name of a flag"
    values = value if isinstance(value, list) else [value]
    if not all(type(entry) in (int, float, str, bool) for entry in values):
        yield f" is {value!r}: give a number, a string, true, false or a list"
    elif isinstance(value, list) and (not value or bool in map(type, values)):
        yield f" is {value!r}: give a list of numbers or strings"
    elif any(str(entry).startswith("--") for entry in values):
        yield f" is {value!r}, which would be read as another flag"


def toml_lines(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield flags as the lines of a file; `read_toml` returns the same flags."""
    for name, value in flags.items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        yield f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else repr(value)


def _text(value: str) -> str:
    """Return a basic string: control characters, quotes and backslashes are escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
