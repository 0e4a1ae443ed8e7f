"""A table of Megatron's flags, to read a command line without importing Megatron.

``python -m megasink.training.flag_table`` rewrites megatron_flags.json for the installed release of
Megatron. The table is valid only for the exact source files that it was made from; with any others,
the ranks check the flags.
"""

import argparse
import enum
import hashlib
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

from megasink.attention.variants.layers import layer_pattern

TABLE = Path(__file__).with_name("megatron_flags.json")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.strip("()").split(",")))


def _frequency(text: str) -> Any:
    return layer_pattern(text) if "[" in text else int(text)


# The types of Megatron's flags by the names of their functions (training/arguments.py); a flag of
# any other type stays text here.
_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool}
_TYPES |= {"tuple_type": _integers, "no_rope_freq_type": _frequency}
_TYPES |= {"moe_freq_type": _frequency, "la_freq_type": _frequency}


def read_table() -> list[dict[str, Any]] | None:
    """Return an entry for each flag of the installed Megatron; None if the table does not match."""
    table = json.loads(TABLE.read_text())
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    try:
        now = {name: _digest(root / name) for name in table["files"]}
    except OSError:
        return None
    flags: list[dict[str, Any]] = table["flags"]
    return flags if now == table["files"] else None


def add_flags(parser: argparse.ArgumentParser, table: list[dict[str, Any]]) -> None:
    """Add the flags of a table to a parser."""
    for entry in table:
        names, given = entry["names"], {"dest": entry["dest"], "default": entry["default"]}
        if entry["kind"] == "value":
            given |= {"nargs": entry["nargs"], "choices": entry["choices"]}
            given["type"] = _TYPES.get(entry["type"], str)
        elif entry["kind"] == "pair":
            given["action"] = argparse.BooleanOptionalAction
            names = [name for name in names if not name.startswith("--no-")]
        else:
            given["action"] = entry["kind"]
        parser.add_argument(*names, **given)


def make_table() -> dict[str, Any]:
    """Make the table for the installed Megatron, which is imported."""
    from megatron.training import argument_utils, arguments

    from megasink.upstream.training import FLAG_SOURCES

    sources = {Path(inspect.getfile(arguments)), Path(inspect.getfile(argument_utils))}
    texts = argument_utils.ArgumentGroupFactory._get_field_docstrings

    def seen(self: Any, options: type) -> Any:
        sources.add(Path(inspect.getfile(options)))
        return texts(self, options)

    with FLAG_SOURCES.replacing(_get_field_docstrings=seen):
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    root = next(path for path in min(sources).parents if path.name == "megatron")
    return {
        "files": {str(path.relative_to(root)): _digest(path) for path in sorted(sources)},
        "flags": [_entry(a) for a in parser._actions if a.dest != "help"],
    }


def _entry(action: argparse.Action) -> dict[str, Any]:
    default = action.default
    entry: dict[str, Any] = {"names": list(action.option_strings), "dest": action.dest}
    if isinstance(action, argparse.BooleanOptionalAction):
        return {**entry, "kind": "pair", "default": default}
    if action.nargs == 0:
        kind = "store_true" if action.const else "store_false"
        return {**entry, "kind": kind, "default": default}
    kind, choices = getattr(action.type, "__name__", "str"), action.choices
    if choices is not None:
        choices = [c.name if isinstance(c, enum.Enum) else c for c in choices]
        kind = kind if kind in _TYPES else "str"
    if isinstance(default, enum.Enum):
        default = default.name
    given = {"type": kind, "nargs": action.nargs, "choices": choices, "default": default}
    return {**entry, "kind": "value", **given}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Write the table for the installed Megatron."""
    from megasink.cpu.process import prepare_process

    prepare_process()
    table = make_table()
    lines = ",\n".join(json.dumps(entry) for entry in table["flags"])
    files = json.dumps(table["files"], indent=1)
    TABLE.write_text(f'{{"files": {files},\n"flags": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
