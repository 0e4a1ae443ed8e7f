"""Checks of a command line, before anything is built.

Each file covers one subject with ``problems(args)``, which returns one message per problem.
"""

from argparse import Namespace

from megasink.command_line import with_help
from megasink.train import run_dir
from megasink.train.checks import (
    balance,
    blocks,
    checkpoints,
    context_parallel,
    data,
    experts,
    gates,
    layout,
    model,
    observing,
    positions,
    required,
    schedule,
    similarity,
    unsupported,
    variants,
)

# None of them imports torch or Megatron.
_EARLY = (
    required,
    model,
    layout,
    variants,
    similarity,
    gates,
    positions,
    blocks,
    experts,
    context_parallel,
    unsupported,
    balance,
    checkpoints,
    schedule,
    observing,
)


def early_problems(args: Namespace) -> list[str]:
    """Return one message per problem that is independent of devices and files."""
    return [*_of_flags(args), *data.problems(args)]


def problems(args: Namespace) -> list[str]:
    """Return one message per problem with the parsed arguments. Reads files, builds nothing."""
    from megasink.train.checks import attention, data_files, device, vocabulary

    found = [*_of_flags(args), *attention.problems(variants.with_known_variant(args))]
    for subject in (device, data, vocabulary, data_files):
        found += subject.problems(args)
    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    if args.rank == 0:
        found += run_dir.problems(args)
    return found


def _of_flags(args: Namespace) -> list[str]:
    found = with_help(args.flag_problems, "megasink train --full-help lists every flag")
    found += variants.unknown(args)
    args = variants.with_known_variant(args)
    for subject in _EARLY:
        found += subject.problems(args)
    return found
