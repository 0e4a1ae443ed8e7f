"""Completion of command lines in bash and zsh, by argcomplete (docs/command-line.md).

The shell runs ``megasink`` with ``_ARGCOMPLETE`` in the environment at every Tab. Only the parser
of the command is built: no plugin is imported, and nothing of torch or Megatron.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

VARIABLE = "_ARGCOMPLETE"


def complete(
    commands: Mapping[str, str], main_of: Callable[[str], Callable[[Sequence[str]], int]]
) -> NoReturn:
    """Answer the shell and end the process.

    Args:
        commands: name -> what it does.
        main_of: Returns the ``main`` of a command.
    """
    import argcomplete

    from megasink import command_line

    def answer(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            # Names of records, to which plugins may add, are no choices of argparse.
            if isinstance(action.metavar, str) and action.metavar.startswith("{"):
                names = action.metavar.strip("{}").split(",")
                vars(action)["completer"] = partial(lambda names, **_: names, names)
        argcomplete.autocomplete(parser, always_complete_options=False)

    try:
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        # The first word is the program; the command is complete if something follows it.
        words = line.split(maxsplit=2)
        if len(words) > 2 or (len(words) == 2 and line[-1].isspace()):
            os.environ[VARIABLE] = "2"  # argcomplete then takes the command for the program
            if words[1] in _OF_TRAINING:
                answer(_OF_TRAINING[words[1]]())
            elif words[1] in commands:
                command_line.hand_parser_to(answer, main_of(words[1]))
        else:
            parser = argparse.ArgumentParser("megasink")
            parser.add_argument("--version", action="store_true")
            parser.add_argument("command", choices=commands)
            answer(parser)
    except Exception:
        pass  # a Tab says nothing: the command itself will tell
    os._exit(1)


def _train() -> argparse.ArgumentParser:
    from megasink.training import early, launch

    return early.add_all(launch.own_parser())


def _plan() -> argparse.ArgumentParser:
    from megasink.plan import launch
    from megasink.training import early

    return early.add_all(launch._parser())


# Their further flags are those of training, which are read apart.
_OF_TRAINING = {"train": _train, "plan": _plan}
