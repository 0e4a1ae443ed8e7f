"""Error messages for flags that argparse rejects, all reported at once.

argparse stops at the first bad flag, prints its usage and suggests no name.
"""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, Self

from megasink.errors import ConfigError, nearest, unknown_name

CLOSE = 0.9
"""Minimum similarity of a misspelt flag to a suggestion if a wrong suggestion would do harm."""
_NEGATIONS = {"no", "not", "without", "disable"}
_NUMBERS = {"int": "a whole number", "float": "a number"}
# argparse's own pattern has no exponent, so it takes -1e-4 for a flag.
_NEGATIVE = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


class CommandParser(argparse.ArgumentParser):
    """`ArgumentParser` whose `parse_args` raises a ConfigError with every problem.

    ``--help`` starts with an example and the flags of `first_screen`; ``--help-all`` shows all.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})
        self._example: str | None = None
        self._first: tuple[str, ...] = ()

    def first_screen(self, example: str, *flags: str) -> Self:
        """Set the flags that ``--help`` shows; return the parser."""
        if unknown := [flag for flag in flags if flag not in self._option_string_actions]:
            raise ValueError(f"{self.prog} has no {', '.join(unknown)}")
        self._example, self._first = example, flags
        if "--help-all" not in self._option_string_actions:
            text = "show every flag" if flags else argparse.SUPPRESS
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=text)
        return self

    def format_help(self) -> str:
        """Return the text of ``--help``."""
        if self._example is None:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self._example.replace("%", "%%"), (), (), "example: ")
        formatter.add_text(self.description)
        of_flag = self._option_string_actions
        first = {of_flag[flag] for flag in (*self._first, "--help-all")}
        for group in self._action_groups:
            actions = group._group_actions
            if self._first:
                actions = [a for a in actions if a in first or not a.option_strings]
            if not actions:
                continue
            formatter.start_section(group.title)
            formatter.add_text(None if self._first else group.description)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse the arguments as argparse does."""
        read = Reading(self, sys.argv[1:] if args is None else args)
        problems = [*read.problems, *(unknown_flags(self, read.unknown))]
        if problems:
            raise ConfigError(with_help(problems, f"{self.prog} --help"))
        if _parsing_only:
            raise _ParsedError
        return read.namespace


_parsing_only = False


class _ParsedError(Exception):
    """Raised after a command has parsed its flags, if it must not run."""


def flag_problems(main: Callable[[Sequence[str]], object], argv: Sequence[str]) -> list[str]:
    """Return the problems of a command's flags, without running it."""
    global _parsing_only
    _parsing_only = True
    try:
        with contextlib.suppress(_ParsedError):
            main(argv)
    except ConfigError as error:
        return error.problems
    finally:
        _parsing_only = False
    return []


class _HelpAll(argparse.Action):
    """Print the help with every flag."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        parser._first = ()
        parser.print_help()
        parser.exit()


class _RefusedError(Exception):
    """Carries the message that argparse passes to `ArgumentParser.error`."""


class Reading:
    """A parsed command line without rejected flags; `refused` has the dests of those."""

    def __init__(self, parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
        self.namespace = argparse.Namespace()
        self.unknown: list[str] = []
        self.problems: list[str] = []
        self.refused: set[str] = set()
        parser.exit_on_error = False
        parser.error = _refuse  # type: ignore[method-assign]
        parser._negative_number_matcher = _NEGATIVE
        left = list(argv)
        while not self._read(parser, left):
            pass

    def _read(self, parser: argparse.ArgumentParser, argv: list[str]) -> bool:
        """Parse `argv`, or remove a rejected flag from it; return whether parsing succeeded."""
        try:
            # The method of the class: the instance may override it with one that calls this.
            self.namespace, self.unknown = type(parser).parse_known_args(parser, argv)
        except argparse.ArgumentError as error:
            names = set((error.argument_name or "").split("/"))
            left = without(argv, names)
            self.problems.append(_sentence(parser, error))
            if len(left) == len(argv):  # a positional argument, or several arguments at once
                self.unknown = _unknown_in(parser, argv)
                return True
            self.refused |= {parser._option_string_actions[name].dest for name in names}
            argv[:] = left
            return False
        except _RefusedError as error:
            self.unknown = _unknown_in(parser, argv)
            self._missing(parser, str(error))
        return True

    def _missing(self, parser: argparse.ArgumentParser, message: str) -> None:
        """Report required flags, except those that were given but rejected or misspelled."""
        _, separator, names = message.partition("are required: ")
        if not separator:
            self.problems.append(_of_several(message))
            return
        known = parser._option_string_actions
        meant = {nearest(word, known) for word in self.unknown}
        missing = [
            name
            for name in names.split(", ")
            if not (name in known and known[name].dest in self.refused)
            and not meant & set(name.split("/"))
        ]
        if missing:
            self.problems.append(f"missing: {', '.join(missing)}")


def dashed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with dashes for underscores in known flags, and the problem."""
    known, problems, words = parser._option_string_actions, list[str](), list[str]()
    for group in groups(argv):
        name, equals, value = group[0].partition("=")
        plain = name.replace("_", "-")
        if name not in known and plain in known:
            problems.append(f"unknown: {' '.join(group)}: did you mean {plain}?")
            group = [plain + equals + value, *group[1:]]
        words += group
    return words, problems


def groups(words: Sequence[str]) -> list[list[str]]:
    """Return the flags of a command line, each with its values."""
    found: list[list[str]] = []
    for word in words:
        if found and not _is_flag(word):
            found[-1].append(word)
        else:
            found.append([word])
    return found


def unknown_flags(
    parser: argparse.ArgumentParser,
    unknown: Sequence[str],
    refused: Collection[str] = (),
    careful: Collection[str] = (),
) -> list[str]:
    """Return one message per unknown flag, with its values and the closest known flag.

    Never its opposite or one that is `refused`; one whose dest is in `careful` must be `CLOSE`.
    """
    actions, problems = parser._option_string_actions, list[str]()
    known = [name for name in actions if name.startswith("--") and name not in refused]
    for group in groups(unknown):
        alike = [name for name in known if _negates(name) == _negates(group[0])]
        meant = nearest(group[0], alike) if _is_flag(group[0]) else None
        if meant and actions[meant].dest in careful:
            meant = nearest(group[0], [meant], cutoff=CLOSE)
        hint = f": did you mean {meant}?" if meant else ""
        problems.append(f"unknown: {' '.join(group)}{hint}")
    return problems


def _negates(flag: str) -> bool:
    return not _NEGATIONS.isdisjoint(flag.replace("_", "-").split("-"))


def with_help(problems: Iterable[str], command: str) -> list[str]:
    """Append the help command to each problem that suggests no alternative."""
    suggesting = ("did you mean", ": choose ")
    return [
        problem if any(words in problem for words in suggesting) else f"{problem} ({command})"
        for problem in problems
    ]


def _refuse(message: str) -> NoReturn:
    raise _RefusedError(message)


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] in "-–—" and not _NEGATIVE.match(word)


def _unknown_in(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the unknown flags of a command line that could not be fully parsed."""
    known = parser._option_string_actions
    return [word for word in argv if _is_flag(word) and word.partition("=")[0] not in known]


def without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without flags, which are given with their dashes, and their values."""
    kept = (group for group in groups(argv) if group[0].partition("=")[0] not in names)
    return [word for group in kept for word in group]


def _sentence(parser: argparse.ArgumentParser, error: argparse.ArgumentError) -> str:
    """Reword an argparse message in the style of megasink's errors."""
    name, message = error.argument_name, error.message
    if name is None:
        return _of_several(message)
    name = name.split("/")[0]
    if wrong := re.fullmatch(r"invalid (\w+) value: (.*)", message, re.S):
        kind, value = wrong.groups()
        action = parser._option_string_actions.get(name)
        if action is not None and action.choices is not None and kind not in _NUMBERS:
            names = [getattr(choice, "name", str(choice)) for choice in action.choices]
            return unknown_name(name, value.strip("'"), names)
        return f"{name} {value}: use {_NUMBERS.get(kind, 'another value')}"
    if wrong := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", message, re.S):
        value, names = wrong.group(1).strip("'"), wrong.group(2).replace("'", "").split(", ")
        return unknown_name(name, value, names)
    if message == "expected one argument":
        return f"{name} needs a value (if it starts with a dash, write {name}=VALUE)"
    if message == "expected at least one argument":
        return f"{name} needs at least one value"
    if other := re.fullmatch(r"not allowed with argument (.*)", message):
        return f"{name} and {other.group(1)}: choose one"
    return f"{name}: {message}"


def _of_several(message: str) -> str:
    """Reword an argparse message that concerns several arguments."""
    if others := re.fullmatch(r"one of the arguments (.*) is required", message):
        return f"missing: {' or '.join(others.group(1).split())}"
    return message
