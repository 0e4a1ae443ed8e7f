"""Checks of a command line, before anything is built.

Each file covers one subject with ``problems(args)``, which yields one message per problem.
"""

from argparse import Namespace
from typing import Any

from megasink.command_line import with_help
from megasink.training import lora_base, run_dir
from megasink.training.checks import (
    balance,
    chat,
    checkpoints,
    choices,
    context_parallel,
    data,
    experts,
    gates,
    hybrid,
    layout,
    lora,
    model,
    muon,
    observing,
    positions,
    prediction,
    quantized,
    rates,
    replaced_tokens,
    required,
    schedule,
    similarity,
    transformer_layer,
    unsupported,
    variant_layers,
    variants,
)

# None of them imports torch or Megatron.
_EARLY = (
    required,
    model,
    hybrid,
    layout,
    variants,
    variant_layers,
    similarity,
    gates,
    positions,
    prediction,
    transformer_layer,
    muon,
    rates,
    experts,
    context_parallel,
    quantized,
    unsupported,
    balance,
    lora,
    checkpoints,
    schedule,
    observing,
    replaced_tokens,
    chat,
)


def early_problems(args: Namespace) -> list[str]:
    """Return one message per problem that is independent of devices and files."""
    return _problems(args, *_EARLY, data)


def problems(args: Namespace) -> list[str]:
    """Return one message per problem with the parsed arguments. Reads files, builds nothing."""
    from megasink.training.checks import attention, data_files, device, vocabulary

    # Other ranks would see files that rank 0 has just written; torchrun ends them if rank 0 fails.
    of_folder = run_dir.problems(args) + lora_base.problems(args) if args.rank == 0 else []
    late = (attention, device, data, vocabulary, data_files)
    return _problems(args, *_EARLY, *late) + variant_layers.unresolved(args) + of_folder


def _problems(args: Namespace, *subjects: Any) -> list[str]:
    flags = with_help(args.flag_problems, "megasink train --help-all lists every flag")
    unknown, args = choices.without_unknown(args)
    return flags + unknown + [text for subject in subjects for text in subject.problems(args)]
