"""All checks of a command line, before anything is built; imports torch."""

from argparse import Namespace

from megasink.options.command_parser import with_help
from megasink.options.megatron_flags import refused
from megasink.training import run_dir
from megasink.training.checks import (
    data_contents,
    data_paths,
    device_options,
    hybrid,
    kernels,
    model_shape,
    monitoring,
    muon,
    parallel_layout,
    required,
    transformer_impl,
    variants,
    vocabulary,
)
from megasink.training.checks.exclusive_options import excluded

_OF_LINE = (
    *(required, model_shape, hybrid, parallel_layout, variants, muon, transformer_impl),
    *(monitoring, data_paths),
)


def of_line(args: Namespace) -> tuple[list[str], Namespace]:
    """Return a message per problem that does not depend on the device."""
    # And the arguments without unknown names, for further checks.
    flags = with_help(args.flag_problems, "megasink train --help-all lists every flag")
    unknown, args = required.without_unknown(args)
    found = [text for subject in _OF_LINE for text in subject.problems(args)]
    pairs = [f"{flag}: {why}" for flag, _, why in refused(args, "always")]
    return [*flags, *unknown, *found, *pairs, *excluded(args)], args


def problems(args: Namespace) -> list[str]:
    """Return one message per problem on this machine. Reads files, builds nothing."""
    found, args = of_line(args)
    for subject in (kernels, device_options, vocabulary, data_contents):
        found += subject.problems(args)
    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    return found + (run_dir.problems(args) if args.rank == 0 else [])
