"""Checks of a command line, before anything is built.

Each file covers one subject with ``problems(args)``, which yields one message per problem. A run
checks each subject once: those of the command line where it is read (training/early.py), the others
on the ranks' machine.
"""

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from megasink.attention.variants.layers import resolve_layers
from megasink.options.command_line import with_help
from megasink.options.megatron_flags import refused
from megasink.training import run_dir
from megasink.training.checks import (
    choices,
    data,
    device,
    hybrid,
    implementation,
    layout,
    model,
    muon,
    observing,
    positions,
    required,
    variants,
    vocabulary,
)
from megasink.training.checks.blends import named_prefixes
from megasink.training.checks.excluded import excluded

# None of them imports torch or Megatron.
_EARLY = (
    required,
    model,
    hybrid,
    layout,
    variants,
    positions,
    muon,
    implementation,
    observing,
    data,
)


def complete(args: Namespace) -> None:
    """Set parsed arguments that others imply. The checks need them."""
    if args.use_rotary_position_embeddings:  # the old name, which Megatron follows late
        args.position_embedding_type = "rope"
    hybrid.count_layers(args)
    resolve_layers(args)


def early_problems(args: Namespace) -> list[str]:
    """Return one message per problem of the command line that does not depend on the device."""
    flags = with_help(args.flag_problems, "megasink train --help-all lists every flag")
    unknown, args = choices.without_unknown(args)
    pairs = [f"{flag}: {why}" for flag, _, why in refused(args, "always")]
    return [*flags, *unknown, *_problems(args, _EARLY), *pairs, *excluded(args)]


def local_problems(args: Namespace, *, thorough: bool) -> list[str]:
    """Return one message per problem with this machine's devices and files, where ranks run.

    Imports neither torch nor Megatron, unless a CUDA device may be present. If `thorough`, also
    reads a tokenizer that takes transformers seconds; the ranks always do.
    """
    _, args = choices.without_unknown(args)
    answers = _problems(args, [device])
    if args.rank:
        return answers
    if thorough or vocabulary.is_quick(args):
        answers += _problems(args, [vocabulary])
        if named_prefixes(args):
            from megasink.training.checks import data_files  # imports numpy

            answers += _problems(args, [data_files])
    return answers + run_dir.problems(args)


def problems(args: Namespace, *, checked: bool = False) -> list[str]:
    """Return one message per problem, as a rank finds them. Reads files, builds nothing.

    `checked` means that `early_problems` found none.
    """
    from megasink.training.checks import attention, data_files

    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    of_folder = run_dir.problems(args) if args.rank == 0 else []
    early = _problems(args, [implementation]) if checked else early_problems(args)
    _, args = choices.without_unknown(args)
    return early + _problems(args, (attention, device, vocabulary, data_files)) + of_folder


def _problems(args: Namespace, subjects: Iterable[Any]) -> list[str]:
    return [text for subject in subjects for text in subject.problems(args)]
