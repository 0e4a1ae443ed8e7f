"""User modules that register variants, metrics and conversion targets.

A plugin is a module whose import calls `register` of `megasink.attention.variants` or of
`megasink.convert.targets`, or decorates with `megasink.analysis.metrics.metric` (CONTRIBUTING.md).
It is named by ``--plugin MODULE`` on the command line, or by an entry point in the group
``megasink.plugins`` of an installed package, and is imported before a command reads its flags, by
every rank. Only the user chooses it: nothing in a run, model or dataset folder is imported.
"""

import argparse
import importlib
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from megasink.errors import UserError

FLAG = "--plugin"
GROUP = "megasink.plugins"
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_INSTALLED = tuple(f"{sysconfig.get_path(n)}{os.sep}" for n in ("stdlib", "purelib", "platlib"))
# Names in a run folder are untrusted: show just enough to recognize them.
_MOST_NAMES, _MOST_CHARACTERS = 5, 80


@dataclass
class Plugin:
    """An imported module."""

    module: str  # its name
    source: str  # what names it: "--plugin", or the package with the entry point
    # {"variant", "metric" or "target": names that it added}; empty unless `load` was given `names`.
    registered: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        named = (f"{kind} {', '.join(names)}" for kind, names in self.registered.items() if names)
        return f"{self.module} ({self.source}): {'; '.join(named) or 'registers nothing'}"


Names = Callable[[], dict[str, Collection[str]]]
LOADED: dict[str, Plugin] = {}
"""The imported plugins by module, in import order."""


def load(argv: Sequence[str], names: Names = dict) -> None:
    """Import the plugins of installed packages, then those that a command line names.

    The current directory is on the path for ``--plugin``, as it is for ``python -m`` (not under
    ``python -P``). `names` returns {kind: names} of everything that is registered at the moment.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.module):
        _load(entry.module, f"package {entry.dist.name}" if entry.dist else GROUP, names)
    modules = _named(argv)
    if modules and not sys.flags.safe_path and sys.path[:1] not in ([""], [str(Path.cwd())]):
        sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        _load(module, FLAG, names)


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin``, which `load` has already acted on, to a command's parser."""
    parser.add_argument(
        FLAG,
        action="append",
        metavar="MODULE",
        help="first import this Python module, which registers your own variants, metrics or "
        "conversion targets; may be repeated",
    )


def flags(argv: Sequence[str]) -> list[str]:
    """Return the plugins of a command line as flags for another one."""
    return [word for module in _named(argv) for word in (FLAG, module)]


def advice(recorded: object = None) -> str:
    """Return the advice for an unregistered name."""
    if not isinstance(recorded, list) or not recorded:
        return f"to use your own, add {FLAG} MODULE"
    names = " ".join(f"{FLAG} {str(name)[:_MOST_CHARACTERS]}" for name in recorded[:_MOST_NAMES])
    return f"add {FLAG} MODULE, which runs its code; the run was trained with {names}"


def _named(argv: Sequence[str]) -> list[str]:
    """Return the values of --plugin; the command's parser reports one without a value."""
    modules = []
    for word, value in itertools.pairwise([*argv, "-"]):
        if word == "--":
            break
        if word.startswith(f"{FLAG}="):
            modules.append(word.removeprefix(f"{FLAG}="))
        elif word == FLAG and not value.startswith("-"):
            modules.append(value)
    return list(dict.fromkeys(modules))


def _load(module: str, source: str, names: Names) -> None:
    if module in LOADED:
        return
    if module.endswith(".py") or not all(name.isidentifier() for name in module.split(".")):
        raise UserError(f"{FLAG} {module}: give the name of a Python module, such as my_module")
    before = names()
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{FLAG} {module} ({source}): {_reason(error, module)}") from error
    LOADED[module] = Plugin(module, source)
    for kind, known in names().items():
        LOADED[module].registered[kind] = [name for name in known if name not in before[kind]]


def _reason(error: BaseException, module: str) -> str:
    """Return the error and the line of the plugin that raised it, in one line."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"no module of that name in {Path.cwd()} or in the installed packages"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({error.filename}:{error.lineno})"
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    ours = (_PACKAGE, "<frozen importlib", importlib.__file__ or "?")
    traced = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in traced if not frame.filename.startswith(ours)]
    written_here = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    if not frames:
        return text
    place = (written_here or frames)[-1]
    return f"{text} ({place.filename}:{place.lineno}: {place.line})"
