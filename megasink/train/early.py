"""What can be said about a command line before Megatron is imported, which takes seconds.

Nothing is refused here that a rank would accept: flags are those of the table of Megatron's flags
(flag_table.py), and what depends on the device, on kernels or on the content of files is left to
the ranks.
"""

import argparse
import math
from collections.abc import Sequence

from megasink.errors import ConfigError
from megasink.flags import add_options
from megasink.parser import CPU_DEFAULTS, DEFAULTS, read_flags
from megasink.train import checks
from megasink.train.flag_table import add_flags, read_table


def check(flags: Sequence[str], ranks: int | None) -> None:
    """Refuse a command line of a rank that is wrong whatever the device.

    Args:
        ranks: processes of the run; None where their number follows from the flags.

    Raises:
        ConfigError: with every problem that shows here.
    """
    table = read_table()
    if table is None or {"-h", "--help"} & set(flags):
        return
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    opaque = add_flags(parser, table)
    parser.set_defaults(**DEFAULTS)
    add_options(parser)
    args = read_flags(parser, flags)
    # There are flags for Kitchen where that package is installed.
    args.flag_problems = [text for text in args.flag_problems if "kitchen" not in text]
    unset = vars(parser.parse_args([]))
    for name in (*opaque, *(name for name in CPU_DEFAULTS if getattr(args, name) == unset[name])):
        setattr(args, name, unset[name] if name in opaque else None)
    sizes = [getattr(args, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    args.rank, args.world_size = 0, ranks or math.prod([*sizes, args.context_parallel_size]) or 1
    problems = checks.early_problems(args)
    if problems:
        raise ConfigError(problems)
