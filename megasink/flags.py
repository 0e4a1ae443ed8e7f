"""Argparse flags from the dataclasses of config.py, without importing Megatron.

Field ``softmax_offset_init`` becomes ``--softmax-offset-init`` and the string below it becomes the
help text, like Megatron's ArgumentGroupFactory, which requires importing all of Megatron.
"""

import argparse
import ast
import inspect
import itertools
import re
import sys
from dataclasses import fields
from functools import cache
from typing import get_args, get_type_hints

from megasink.run_options import OPTIONS


def flag_of(dest: str) -> str:
    """Return the flag for an attribute of the parsed arguments."""
    return "--" + dest.replace("_", "-")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a group of flags for each dataclass of OPTIONS."""
    for options in OPTIONS:
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", options.__name__).lower()
        group = parser.add_argument_group(words, escaped(inspect.cleandoc(options.__doc__ or "")))
        texts, kinds = _texts(options), get_type_hints(options)
        for field in fields(options):
            flag, text = flag_of(field.name), escaped(texts[field.name])
            kind, meta = kinds[field.name], field.metadata.get("argparse_meta", {})
            if "records" in field.metadata:
                records = field.metadata["records"]()
                meta = meta | {"metavar": "{" + ",".join(r.name for r in records) + "}"}
                text += escaped("".join(f" {r.name}: {r.description}." for r in records))
            if kind is bool and not meta:
                group.add_argument(flag, action="store_true", help=text)
                continue
            # float | None is an optional float.
            kind = next((k for k in (kind, *get_args(kind)) if k in (int, float)), str)
            shown = "" if field.default in (None, False) else " Default: %(default)s."
            given = {"type": kind, "default": field.default, "help": text + shown}
            group.add_argument(flag, **(given | meta))


def escaped(text: str) -> str:
    """Escape the % signs of a help text, except for argparse's own %(name)s fields."""
    return re.sub(r"%(?!\(\w+\)[sdrf])%?", "%%", text)


@cache
def _texts(options: type) -> dict[str, str]:
    """Return {field: the string below it} for a dataclass."""
    texts: dict[str, str] = {}
    for field, text in itertools.pairwise(_classes(options.__module__)[options.__name__].body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name: parsed once, where inspect would for each of them."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {entry.name: entry for entry in tree.body if isinstance(entry, ast.ClassDef)}
