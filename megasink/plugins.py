"""Modules of a user's own that register variants, metrics and conversion targets.

A plugin is a module whose import calls `register` of `megasink.variants` or of
`megasink.convert.targets`, or decorates with `megasink.diagnostics.metric` (CONTRIBUTING.md). It is
named by ``--plugin MODULE`` on the command line, or by an entry point in the group
``megasink.plugins`` of an installed package, and imported before a command reads its flags, by
every rank. It is code that its user asks for: no file of a run, a model or a data set names one
that is imported.
"""

import argparse
import importlib
import itertools
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from megasink.errors import UserError

FLAG = "--plugin"
GROUP = "megasink.plugins"
_PACKAGE = str(Path(__file__).parent)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# Names in a run folder are text from outside: enough of it to recognise them.
_MOST_NAMES, _MOST_CHARACTERS = 5, 80


@dataclass
class Plugin:
    """A module that was imported.

    Attributes:
        module: its name.
        source: who asked for it: "--plugin", or the package with the entry point.
        registered: {"variant", "metric" or "target": names that it added}; empty unless `load` was
            told to look.
    """

    module: str
    source: str
    registered: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        named = (f"{kind} {', '.join(names)}" for kind, names in self.registered.items() if names)
        return f"{self.module} ({self.source}): {'; '.join(named) or 'registers nothing'}"


LOADED: dict[str, Plugin] = {}
"""By module, in the order of their import."""


def load(argv: Sequence[str], *, list_names: bool = False) -> None:
    """Import the plugins of installed packages, then those that a command line names.

    The current directory is on the path for ``--plugin``, as it is for ``python -m`` (not under
    ``python -P``).

    Args:
        argv: a command's arguments, not parsed yet.
        list_names: fill `Plugin.registered`, which imports every registry first.

    Raises:
        UserError: one cannot be imported, or registers a name that exists; with its place.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.module):
        _load(entry.module, f"package {entry.dist.name}" if entry.dist else GROUP, list_names)
    modules = _named(argv)
    if modules and not sys.flags.safe_path and sys.path[:1] not in ([""], [str(Path.cwd())]):
        sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        _load(module, FLAG, list_names)


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Let a command's parser know ``--plugin``, which `load` has acted on before."""
    parser.add_argument(
        FLAG,
        action="append",
        metavar="MODULE",
        help="import this Python module first, which registers variants, metrics or conversion "
        "targets of your own; may be repeated",
    )


def flags(argv: Sequence[str]) -> list[str]:
    """The plugins that a command line names, as flags for another one."""
    return [word for module in _named(argv) for word in (FLAG, module)]


def advice(recorded: object = None) -> str:
    """What to do about a name that is registered nowhere.

    Args:
        recorded: "plugin" of a run's config.json: shown, never imported.
    """
    if not isinstance(recorded, list) or not recorded:
        return f"one of your own comes with {FLAG} MODULE"
    names = " ".join(f"{FLAG} {str(name)[:_MOST_CHARACTERS]}" for name in recorded[:_MOST_NAMES])
    return f"give {FLAG} MODULE, whose code then runs; the run was trained with {names}"


def _named(argv: Sequence[str]) -> list[str]:
    """The values of --plugin; one without a value is left to the command's parser."""
    modules = []
    for word, value in itertools.pairwise([*argv, "-"]):
        if word == "--":
            break
        if word.startswith(f"{FLAG}="):
            modules.append(word.removeprefix(f"{FLAG}="))
        elif word == FLAG and not value.startswith("-"):
            modules.append(value)
    return list(dict.fromkeys(modules))


def _load(module: str, source: str, list_names: bool) -> None:
    if module in LOADED:
        return
    if module.endswith(".py") or not all(name.isidentifier() for name in module.split(".")):
        raise UserError(f"{FLAG} {module}: give a module's name as Python imports it: my_module")
    before = _registered() if list_names else {}
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{FLAG} {module} ({source}): {_reason(error, module)}") from error
    LOADED[module] = Plugin(module, source)
    for kind, names in _registered().items() if list_names else ():
        LOADED[module].registered[kind] = [name for name in names if name not in before[kind]]


def _registered() -> dict[str, Collection[str]]:
    """{kind: names} of everything that is registered now."""
    from megasink import variants
    from megasink.convert.targets import TARGETS
    from megasink.diagnostics import metrics

    return {"variant": variants.names(), "metric": list(metrics()), "target": list(TARGETS)}


def _reason(error: BaseException, module: str) -> str:
    """One line: what was raised, and the line of the plugin that raised it."""
    if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
        return f"no module of that name in {Path.cwd()} or among the installed packages"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({error.filename}:{error.lineno})"
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    frames = list(_frames(error))
    written_here = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    if not frames:
        return text
    place = (written_here or frames)[-1]
    return f"{text} ({place.filename}:{place.lineno}: {place.line})"


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """Of its traceback, without those of importing and of megasink."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith((_PACKAGE, "<frozen importlib", importlib.__file__ or "?")):
            continue
        yield frame
