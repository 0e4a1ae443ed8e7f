"""Recipes and configuration files: flags of `megasink train` (docs/recipes.md).

A file is TOML: flags by flat name, ``include`` (one file whose flags come first), ``about`` (a
line) and ``vocabulary`` (tokens of the paper's tokenizer, for a plan). The last value of a flag
counts, ``false`` drops a flag, and of flags that exclude each other the last one stays. A run
folder is the file of its last start.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasink.checkpoints.find import runs_in
from megasink.errors import ConfigError, UserError, nearest, unknown_name
from megasink.options.command_parser import groups
from megasink.options.megatron_flags import having
from megasink.training.flag_file import Flags, flag_words, form_problems, read_toml, refused

FLAG, EXPANDED = "--recipe", "--expanded-recipe"
OF_RUN = "config.toml"
"""File in a run folder with the flags of the last start."""
KEYS = ("about", "include", "vocabulary")
# Not in a file: a plugin is code, and the others belong to one start of one run.
_ON_THE_COMMAND_LINE = set("plugin ranks run-dir resume recipe expanded-recipe".split())
# A command line may have one flag of each set: a later one replaces the others.
_ONE_OF = [
    {name.replace("_", "-") for name in having(fact)}
    for fact in ("length", "warmup", "decay", "activation", "norm", "data")
]
_OF_PARTS = {"train-data-path", "valid-data-path", "test-data-path", "per-split-data-args-path"}
_FOLDER = Path(__file__).parent

Known = Mapping[str, int | str | None]
"""Flags with their dashes, and argparse's `nargs` of each: 0 for a switch."""


@dataclass(frozen=True)
class Recipe:
    """A file with the files that it includes; a dropped flag is false."""

    name: str
    about: str
    flags: Flags
    vocabulary: int | None = None

    @property
    def label(self) -> str:
        """The name and the start of the SHA-256 of the flags, for a run's records."""
        digest = hashlib.sha256(json.dumps(self.flags).encode()).hexdigest()
        return f"{self.name}@{digest[:12]}"


def shipped() -> list[str]:
    """Return the names of the recipes in this package, without files for inclusion."""
    return [path.stem for path in sorted(_FOLDER.glob("*.toml")) if "about" in read_toml(path)]


def read(name: str, known: Known | None = None) -> Recipe:
    """Read a shipped recipe, or a file; flags that are not `known` are refused, if any are."""
    files, problems = [_path(name, Path())], list[str]()
    contents = [read_toml(files[0])]
    while (include := contents[-1].get("include")) is not None:
        if not isinstance(include, str) or not include:
            problems.append(f"{files[-1]}: include is {include!r}: give one name or path")
            break
        path = _path(include, files[-1].parent)
        if any(path.samefile(other) for other in files):
            problems.append(f"{files[-1]}: include {include!r} is circular: remove it")
            break
        files.append(path)
        contents.append(read_toml(path))
    flags: Flags = {}
    vocabulary = None
    for path, content in zip(reversed(files), reversed(contents), strict=True):
        vocabulary = content.get("vocabulary", vocabulary)
        if vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1):
            problems.append(f"{path}: vocabulary is {vocabulary!r}: give a number of tokens")
            vocabulary = None
        about = content.get("about", "")
        if not isinstance(about, str):
            problems.append(f"{path}: about is {about!r}: give a string")
        own = {key: value for key, value in content.items() if key not in KEYS}
        problems += [f"{path}: {text}" for text in _problems(own, known or {})]
        flags = (
            _without_rivals(flags, [key for key, value in own.items() if value is not False]) | own
        )
    if problems:
        raise ConfigError(problems)
    return Recipe(name, contents[0].get("about", ""), flags, vocabulary)


def vocabulary(argv: Sequence[str]) -> int | None:
    """Return the vocabulary of the last recipe of a command line that has one."""
    names, _ = _split(argv)
    sizes = [read(name).vocabulary for name in names or ()]
    return next((size for size in reversed(sizes) if size is not None), None)


def expanded(argv: Sequence[str]) -> list[str]:
    """Replace ``--recipe`` by the flags that it stands for, before the other flags."""
    # ``--expanded-recipe`` records their origin. ``--NAME=false`` drops a switch of the files.
    # Everything that starts a run from words calls this first.
    names, others = _split(argv)
    if names is None:
        return list(argv)
    recipes = [read(name) for name in names]
    unsafe = {
        name: (
            f"{recipe.name}: {text} is not accepted from a file, for safety: pass the flag on "
            "the command line"
        )
        for recipe in recipes
        for name, text in refused(flag_words(recipe.flags)).items()
    }
    overridden = {word[2:].partition("=")[0] for word in others if word.startswith("--")}
    if problems := [text for name, text in unsafe.items() if name not in overridden]:
        raise ConfigError(problems)
    flags: Flags = {}
    for recipe in recipes:
        given = [name for name, value in recipe.flags.items() if value is not False]
        own = {name: value for name, value in recipe.flags.items() if name not in unsafe}
        flags = _without_rivals(flags, given) | own
    switches = [*unsafe, *(name for name, value in flags.items() if value is True)]
    dropped = {f"--{name}=false": name for name in switches}
    flags |= dict.fromkeys((dropped[word] for word in others if word in dropped), False)
    others = [word for word in others if word not in dropped]
    here = [word[2:].partition("=")[0] for word in others if word.startswith("--")]
    flags = _without_rivals(flags, here)
    labels = [recipe.label for recipe in recipes]
    # A command's first words, such as MODEL, would otherwise become the last flag's value.
    first = list(itertools.takewhile(lambda word: not word.startswith("-"), others))
    return [*first, EXPANDED, *labels, *flag_words(flags), *others[len(first) :]]


def _without_rivals(flags: Flags, given: Collection[str]) -> Flags:
    """Drop flags that exclude one of those given after them."""
    rivals = {name for names in _ONE_OF if not names.isdisjoint(given) for name in names}
    if not _OF_PARTS.isdisjoint(given):
        rivals.add("split")
    return {name: value for name, value in flags.items() if name not in rivals - {*given}}


def _split(argv: Sequence[str]) -> tuple[list[str] | None, list[str]]:
    """Return the values of --recipe, None without it, and the other words."""
    given, others = list[list[str]](), list[str]()
    for group in groups(argv):
        if group[0].partition("=")[0] == FLAG:
            given.append([*group[0].split("=", 1)[1:], *group[1:]])
        else:
            others += group
    if len(given) > 1:
        twice = f"{FLAG} is given twice: pass all files after one {FLAG}; later files override "
        raise ConfigError(f"{twice}earlier ones")
    if given and not any(given[0]):
        raise ConfigError(f"{FLAG} needs a value: a file or one of {', '.join(shipped())}")
    return (given[0] if given else None), others


def _path(name: str, folder: Path) -> Path:
    """Find a recipe by its path from `folder`, a shipped name, or a run folder."""
    path = folder / name
    if path.is_dir() and (path / OF_RUN).is_file():
        return path / OF_RUN
    if path.is_file():
        return path
    if re.fullmatch(r"[\w.-]+", name) and (_FOLDER / f"{name}.toml").is_file():
        return _FOLDER / f"{name}.toml"
    if runs := runs_in(path, OF_RUN):
        raise UserError(f"{path} {runs}")
    if "/" in name or name.endswith(".toml"):
        if path.is_dir():
            raise UserError(f"{path} is not a run: it has no {OF_RUN}")
        raise UserError(f"the recipe {path} does not exist")
    raise UserError(unknown_name("the recipe", name, shipped()) + ", or give the path of a file")


def _problems(flags: Flags, known: Known) -> list[str]:
    problems = []
    for name, value in flags.items():
        if name in _ON_THE_COMMAND_LINE:
            problems.append(f"{name}: give this flag on the command line instead")
        elif isinstance(value, dict):
            problems.append(f"{name} is a table: use top-level flags, such as num-layers = 2")
        elif known and f"--{name}" not in known and not name.startswith("-"):
            meant = nearest(f"--{name}", (*known, *(f"--{key}" for key in KEYS)))
            hint = f": did you mean {meant.removeprefix('--')}?" if meant else ""
            problems.append(f"{name} is not a flag of megasink train{hint}")
        else:
            wrong = [f"{name}{text}" for text in form_problems(name, value)]
            takes, is_switch = known.get(f"--{name}", "?"), type(value) is bool
            if not wrong and takes == 0 and not is_switch:
                wrong = [f"{name} is {value!r}, but this flag is a switch: give true or false"]
            elif not wrong and value is True and takes not in (0, "?", "*"):
                wrong = [f"{name} is true, but this flag needs a value"]
            problems += wrong
    return problems
