"""What a command line gets wrong, found before anything is built.

A file for each subject, each with ``problems(args)``: a sentence for everything wrong there.
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
    """What is wrong whatever the device and the files hold, a sentence each."""
    return [*_of_flags(args), *data.missing(args)]


def problems(args: Namespace) -> list[str]:
    """Everything wrong with parsed arguments, a sentence each. Reads files, builds nothing."""
    from megasink.train.checks import attention, data_files, device

    found = [*_of_flags(args), *attention.problems(variants.with_known_variant(args))]
    for subject in (device, data, data_files):
        found += subject.problems(args)
    # The others would see what rank 0 has just written; torchrun ends them when rank 0 refuses.
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
