"""Argparse flags from dataclasses, like Megatron's ArgumentGroupFactory, without Megatron.

A field's name becomes the flag, and the string below it the help text.
"""

import argparse
import ast
import inspect
import itertools
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_origin, get_type_hints


def flag_of(dest: str) -> str:
    """Return the flag for an attribute of the parsed arguments."""
    return "--" + dest.replace("_", "-")


def add_fields(group: argparse._ActionsContainer, options: type, *names: str) -> None:
    """Add flags for some fields of a dataclass; a tuple's takes several values."""
    texts, kinds = _texts(options), get_type_hints(options)
    by_name = {field.name: field for field in fields(options)}
    for field in map(by_name.__getitem__, names):
        text = escaped(texts[field.name])
        kind, meta = kinds[field.name], field.metadata.get("argparse_meta", {})
        flags = (flag_of(field.name), *meta.get("names", ()))
        if "records" in field.metadata:
            records = field.metadata["records"]()
            meta = meta | {"metavar": "{" + ",".join(r.name for r in records) + "}"}
            text += escaped("".join(f" {r.name}: {r.description}." for r in records))
        if kind is bool and not meta:
            group.add_argument(*flags, action="store_true", help=text)
            continue
        # float | None is an optional float, tuple[float, ...] several.
        parts = (kind, *get_args(kind))
        if several := next((part for part in parts if get_origin(part) is tuple), None):
            meta, parts = {"nargs": "+"} | meta, get_args(several)
        kind = next((part for part in parts if part in (int, float, Path)), str)
        shown = " Default: %(default)s."
        if field.default in (None, False, (), MISSING) or "default: " in text:
            shown = ""
        given = {"type": kind, "default": field.default, "help": text + shown}
        if field.default is MISSING:
            given |= {"default": None, "required": True}
        group.add_argument(*flags, **(given | {k: v for k, v in meta.items() if k != "names"}))


def escaped(text: str) -> str:
    """Escape the % signs of a help text, except for argparse's own %(name)s fields."""
    return re.sub(r"%(?!\(\w+\)[sdrf])%?", "%%", text)


@cache
def _texts(options: type) -> dict[str, str]:
    """Return {field: the string below it} for a dataclass, inherited fields included."""
    texts = {
        k: v for base in options.__bases__ if is_dataclass(base) for k, v in _texts(base).items()
    }
    for field, text in itertools.pairwise(_classes(options.__module__)[options.__name__].body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name, parsed once; inspect would parse it for each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {entry.name: entry for entry in tree.body if isinstance(entry, ast.ClassDef)}
