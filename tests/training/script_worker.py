"""Checks the flags of launch scripts as a rank does, in a process of its own.

Reads [[flags, ranks], ...] from standard input; writes on its last line [[problem, ...], ...]: of
our checks, of Megatron's, and of the configuration of the model.
"""

import contextlib
import json
import sys

from megasink.cpu.prepare_process import prepare_process
from megasink.errors import ConfigError
from tests.training.recipe_worker import parse


def problems(flags: list[str], ranks: int) -> list[str]:
    """What is wrong with a command line; nothing is built."""
    from megasink.megatron.model_of_arguments import model_config
    from megasink.training.parse_arguments import refusals_of_megatron

    try:
        args = parse(flags, ranks)
        with refusals_of_megatron():
            model_config(args).finalize()
    except ConfigError as error:
        return error.problems
    return []


def main() -> None:
    prepare_process("cpu")
    with contextlib.redirect_stdout(sys.stderr):
        found = [problems(flags, ranks) for flags, ranks in json.load(sys.stdin)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
