"""Read and check a training command line before importing Megatron, which takes seconds.

A launcher does it once for its ranks; a rank of torchrun does it for itself. Nothing is refused
that a rank would accept: flags come from the table of Megatron's flags (flag_table.py). On the
ranks' machine, the device and small files are checked too, so that one message has all problems.
The ranks check everything that needs torch.
"""

import argparse
import hashlib
import math
import os
import re
from argparse import Namespace
from collections.abc import Sequence

from megasink import cpu
from megasink.errors import ConfigError
from megasink.megatron.arguments import CPU_DEFAULTS, DEFAULTS, read_flags
from megasink.options.command_line import Reading
from megasink.options.flags import add_options
from megasink.training import checks, recipes, run_dir
from megasink.training.flag_file import given_device
from megasink.training.flag_table import add_flags, read_table

_SIZES = ("tensor_model", "pipeline_model", "context")
_KITCHEN = re.compile("(unknown: )?--kitchen-")
CHECKED = "MEGASINK_CHECKED"
"""Variable of ranks: the `digest` of the command line that their launcher has checked."""


def read(
    flags: Sequence[str], parser: argparse.ArgumentParser | None = None, *, here: bool = False
) -> Namespace:
    """Parse the flags of a run, with their defaults; refuse those that cannot be parsed.

    Without a table for the installed Megatron: only megasink's flags, and the Megatron flags that
    the launcher uses. If the ranks run `here`, this machine's device gives some defaults.
    """
    parser = parser or argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    table = read_table()
    if table is None:
        add_options(parser)
        parser.add_argument("--train-iters", type=int)
        for kind in _SIZES:
            name = f"--{kind.replace('_', '-')}-parallel-size"
            parser.add_argument(name, type=int, default=1)
        reading = Reading(parser, flags)
        if reading.problems:
            raise ConfigError(reading.problems)
        return reading.namespace
    add_flags(parser, table)
    parser.set_defaults(**DEFAULTS)
    add_options(parser)
    on_cpu = here and (given_device(flags) == "cpu" or not cpu.cuda_present())
    if on_cpu:
        parser.set_defaults(**CPU_DEFAULTS)
    args = read_flags(parser, flags)
    # Kitchen's flags exist only if that package is installed.
    args.flag_problems = [text for text in args.flag_problems if not _KITCHEN.match(text)]
    for name in () if on_cpu else CPU_DEFAULTS:  # their defaults depend on the device
        if getattr(args, name) == parser.get_default(name):
            setattr(args, name, None)
    return args


def digest(argv: Sequence[str]) -> str:
    """Return the SHA-256 of the words of a command line, in hexadecimal."""
    return hashlib.sha256("\0".join(argv).encode(errors="surrogateescape")).hexdigest()


def was_checked(argv: Sequence[str]) -> bool:
    """Return whether the launcher of this process has checked its command line."""
    return os.environ.get(CHECKED) == digest(argv)


def expanded(argv: Sequence[str]) -> list[str]:
    """Return a command line with the flags of its files in the place of --recipe.

    All starts of a run from words call this before anything else reads them.
    """
    if not any(word.partition("=")[0] == recipes.FLAG for word in argv):
        return list(argv)
    return recipes.expanded(argv, known_flags())


def known_flags() -> recipes.Known:
    """Return all flags; none without a table for the installed Megatron."""
    table = read_table()
    if table is None:
        return {}
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_flags(parser, table)
    add_options(parser)
    actions = parser._option_string_actions.items()
    return {name: action.nargs for name, action in actions if name.startswith("--")}


def refuse(args: Namespace, ranks: int | None, *, here: bool = False, rank: int = 0) -> bool:
    """Refuse flags from `read` that are wrong on any device, with all problems in one error.

    If the ranks run `here`, this machine's device and files count, too. Returns whether the flags
    were checked: not without a table for the installed Megatron.
    """
    if not hasattr(args, "flag_problems"):
        return False
    args.rank, args.world_size = rank, ranks or replica_ranks(args)
    if here:
        run_dir.use_own_tokenizer(args)
    checks.complete(args)
    problems = checks.early_problems(args)
    if here:
        problems += checks.local_problems(args, thorough=bool(problems))
    if problems:
        raise ConfigError(problems)
    return True


def replica_ranks(args: Namespace) -> int:
    """Return the number of ranks per model replica; 1 if the flags are wrong."""
    return math.prod(getattr(args, f"{kind}_parallel_size") for kind in _SIZES) or 1


def default_ranks(args: Namespace) -> int:
    """Return the ranks to start here: one per CUDA device, or else one model replica."""
    return cuda_devices(args) or replica_ranks(args)


def cuda_devices(args: Namespace) -> int:
    """Return the number of CUDA devices that the ranks would use."""
    if args.device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count() if cpu.cuda_present() else 0
