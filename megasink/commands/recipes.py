"""``megasink recipes``: list the recipes, or show the flags of one, of a file or of a run."""

import re
from collections.abc import Sequence
from pathlib import Path

from megasink import recipes
from megasink.command_line import CommandParser
from megasink.errors import UserError
from megasink.flag_file import Flags, toml_lines

_NOT_SHOWN = ("plugin", "run-dir", "resume", "expanded-recipe")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per recipe, or a TOML file for `megasink train --recipe`."""
    parser = CommandParser(
        prog="megasink recipes",
        description="List the recipes of megasink train --recipe, or print the flags of one, with "
        "those of the files that it includes. The flags of a run are those of its last start.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a name, a TOML file or a run folder"
    )
    name = parser.parse_args(argv).recipe
    if name is None:
        for each in recipes.shipped():
            print(f"{each:18} {recipes.read(each).about}")
        return 0
    if Path(name).is_dir():
        about, flags = f"the flags of {name}", _flags_of_run(Path(name))
    else:
        from megasink.train.early import known_flags

        recipe = recipes.read(name, known_flags())
        about, flags = recipe.about, recipe.flags
    shown: Flags = {"about": about} | flags if about else flags
    print("\n".join(toml_lines(shown)))
    return 0


def _flags_of_run(run: Path) -> Flags:
    """Return the flags of a run's last start that a recipe may hold.

    Raises:
        UserError: the folder holds no run.
    """
    from megasink.train.last_start import last_start
    from megasink.train.replay import named_values

    words = last_start(run).get("command", [])[1:]
    if not words:
        raise UserError(f"{run} holds no run: no start is recorded in {run}/starts.jsonl")
    flags: Flags = {}
    for name, values in named_values(words):
        if name and name not in _NOT_SHOWN:
            numbers = [_number(value) for value in values]
            flags[name] = numbers if len(numbers) > 1 else numbers[0] if numbers else True
    return flags


def _number(word: str) -> int | float | str:
    """Return a number where its text in TOML is the word again, else the word."""
    if not re.fullmatch(r"-?(\d+|\d+\.\d+)([eE][-+]?\d+)?", word):
        return word
    number = int(word) if re.fullmatch(r"-?\d+", word) else float(word)
    return number if str(number) == word else word
