"""What a command line gets wrong, found before anything is built.

A file for each subject, each with ``problems(args)``: a sentence for everything wrong there.
"""

from argparse import Namespace

from megasink.train import run_dir
from megasink.train.checks import (
    attention,
    balance,
    blocks,
    checkpoints,
    context_parallel,
    data,
    data_files,
    device,
    experts,
    gates,
    observing,
    positions,
    schedule,
    similarity,
    unsupported,
)

_SUBJECTS = (
    attention,
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
    device,
    data,
    data_files,
)


def problems(args: Namespace) -> list[str]:
    """Everything wrong with parsed arguments, a sentence each. Reads files, builds nothing."""
    found: list[str] = []
    if args.unknown_flags:
        found.append(
            f"unknown: {' '.join(args.unknown_flags)} (megasink train --full-help lists every flag)"
        )
    for subject in _SUBJECTS:
        found += subject.problems(args)
    # The others would see what rank 0 has just written; torchrun ends them when rank 0 refuses.
    if args.rank == 0:
        found += run_dir.problems(args)
    return found
