"""A command line of training, read before Megatron is imported, which takes seconds.

Nothing is refused here that a rank would accept: flags are those of the table of Megatron's flags
(flag_table.py), and what depends on the device, on kernels or on the content of files is left to
the ranks.
"""

import argparse
import math
from argparse import Namespace
from collections.abc import Sequence

from megasink import platform
from megasink.command_line import Reading
from megasink.errors import ConfigError
from megasink.flags import add_options
from megasink.parser import CPU_DEFAULTS, DEFAULTS, read_flags
from megasink.train import checks
from megasink.train.flag_table import add_flags, read_table

_SIZES = ("tensor_model", "pipeline_model", "context")


def read(flags: Sequence[str]) -> Namespace:
    """The flags of a rank, with their defaults.

    Where there is no table of the installed Megatron: megasink's own, and Megatron's that the
    launcher looks at.

    Raises:
        ConfigError: nothing could be read.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    table = read_table()
    if table is None or {"-h", "--help"} & set(flags):
        add_options(parser)
        parser.add_argument("--train-iters", type=int)
        for kind in _SIZES:
            name = f"--{kind.replace('_', '-')}-parallel-size"
            parser.add_argument(name, type=int, default=1)
        return Reading(parser, flags).namespace
    opaque = add_flags(parser, table)
    parser.set_defaults(**DEFAULTS)
    add_options(parser)
    args = read_flags(parser, flags)
    # There are flags for Kitchen where that package is installed.
    args.flag_problems = [text for text in args.flag_problems if "kitchen" not in text]
    unset = vars(parser.parse_args([]))
    for name in (*opaque, *(name for name in CPU_DEFAULTS if getattr(args, name) == unset[name])):
        setattr(args, name, unset[name] if name in opaque else None)
    return args


def refuse(args: Namespace, ranks: int | None) -> None:
    """Refuse flags that are wrong whatever the device.

    Args:
        args: of `read`.
        ranks: processes of the run; None where their number follows from the flags.

    Raises:
        ConfigError: with every problem that shows here.
    """
    if not hasattr(args, "flag_problems"):
        return
    args.rank, args.world_size = 0, ranks or replica_ranks(args)
    problems = checks.early_problems(args)
    if problems:
        raise ConfigError(problems)


def check(flags: Sequence[str], ranks: int | None) -> Namespace:
    """`read` and `refuse`."""
    args = read(flags)
    refuse(args, ranks)
    return args


def replica_ranks(args: Namespace) -> int:
    """Ranks that hold one replica of the model; 1 where the flags are wrong."""
    return math.prod(getattr(args, f"{kind}_parallel_size") for kind in _SIZES) or 1


def default_ranks(args: Namespace) -> int:
    """Ranks to start on this machine: one for each CUDA device, else one replica of the model."""
    return cuda_devices(args) or replica_ranks(args)


def cuda_devices(args: Namespace) -> int:
    """How many CUDA devices the ranks would use."""
    if args.cpu:
        return 0
    import torch

    return torch.cuda.device_count() if platform.cuda_present() else 0
