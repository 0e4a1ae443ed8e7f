"""All checks of a command line, before anything is built; imports torch."""

from argparse import Namespace

from megasink.options.command_line import with_help
from megasink.options.megatron_flags import refused
from megasink.training import run_dir
from megasink.training.checks import (
    attention,
    data,
    data_files,
    device,
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
    vocabulary,
)
from megasink.training.checks.excluded import excluded

_OF_LINE = (
    *(required, model, hybrid, latent, layout, variants, positions, muon, implementation),
    *(observing, data),
)


def of_line(args: Namespace) -> tuple[list[str], Namespace]:
    """Return a message per problem that does not depend on the device.

    And the arguments without unknown names, for further checks.
    """
    flags = with_help(args.flag_problems, "megasink train --help-all lists every flag")
    unknown, args = required.without_unknown(args)
    found = [text for subject in _OF_LINE for text in subject.problems(args)]
    pairs = [f"{flag}: {why}" for flag, _, why in refused(args, "always")]
    return [*flags, *unknown, *found, *pairs, *excluded(args)], args


def problems(args: Namespace) -> list[str]:
    """Return one message per problem on this machine. Reads files, builds nothing."""
    found, args = of_line(args)
    for subject in (attention, device, vocabulary, data_files):
        found += subject.problems(args)
    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    return found + (run_dir.problems(args) if args.rank == 0 else [])
