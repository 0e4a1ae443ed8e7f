"""``megasink recipes``: list the recipes, or show the flags of one, of a file or of a run."""

from collections.abc import Sequence

from megasink.options.command_parser import CommandParser
from megasink.training import recipes
from megasink.training.flag_file import Flags, toml_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per recipe, or a TOML file for `megasink train --recipe`."""
    parser = CommandParser(
        prog="megasink recipes",
        description="List the recipes for megasink train --recipe, or print the flags of one "
        "recipe (with those of included files) or of a run's last start.",
    )
    parser.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help="a name, a TOML file or a run folder"
    )
    args = parser.first_screen("megasink recipes p0-0.6b").parse_args(argv)
    name = args.recipe
    if name is None:
        for each in recipes.shipped():
            print(f"{each:18} {recipes.read(each).about}")
        return 0
    recipe = recipes.read(name)
    about, flags = recipe.about, recipe.flags
    shown: Flags = {"about": about} | flags if about else flags
    print("\n".join(toml_lines(shown)))
    return 0
