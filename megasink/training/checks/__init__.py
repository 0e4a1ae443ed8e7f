"""Checks of a command line, before anything is built.

Each file covers one subject with ``problems(args)``, which yields one message per problem.
"""

from argparse import Namespace

from megasink.options.command_line import with_help
from megasink.options.megatron_flags import refused


def of_line(args: Namespace) -> list[str]:
    """Return one message per problem of the command line that does not depend on the device."""
    return _of_line(args)[0]


def _of_line(args: Namespace) -> tuple[list[str], Namespace]:
    """Return the messages, and the arguments without unknown names, for further checks."""
    from megasink.training.checks import (
        data,
        hybrid,
        implementation,
        latent,
        layout,
        model,
        muon,
        observing,
        positions,
        required,
        variants,
    )
    from megasink.training.checks.excluded import excluded

    flags = with_help(args.flag_problems, "megasink train --help-all lists every flag")
    unknown, args = required.without_unknown(args)
    subjects = (required, model, hybrid, latent, layout, variants, positions, muon, implementation)
    found = [text for subject in (*subjects, observing, data) for text in subject.problems(args)]
    pairs = [f"{flag}: {why}" for flag, _, why in refused(args, "always")]
    return [*flags, *unknown, *found, *pairs, *excluded(args)], args


def problems(args: Namespace) -> list[str]:
    """Return one message per problem on this machine. Reads files, builds nothing."""
    from megasink.training import run_dir
    from megasink.training.checks import attention, data_files, device, vocabulary

    found, args = _of_line(args)
    for subject in (attention, device, vocabulary, data_files):
        found += subject.problems(args)
    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    return found + (run_dir.problems(args) if args.rank == 0 else [])
