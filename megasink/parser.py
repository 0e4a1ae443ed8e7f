"""Megatron's argument parser with our options in it, and with our defaults for Megatron's."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

from megasink import platform
from megasink.config import OPTIONS
from megasink.errors import ConfigError

# Megatron's default is 0.1 for both dropouts; attention dropout breaks the identity between a
# gate and the LSE (P0.9). Megatron's default for context parallelism, p2p, is not supported. The
# optimizer state must be saved in a form that any layout can load.
# On SIGTERM, which schedulers send before they kill, a checkpoint is saved. --async-save is
# switched off by Megatron without a persistent writer; the other strategy is a package.
DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "cp_comm_type": ["all_gather"],
    "ckpt_format": "torch_dist",
    "dist_ckpt_optim_fully_reshardable": True,
    "exit_signal_handler": True,
    "use_persistent_ckpt_worker": True,
    "async_strategy": "mcore",
    "tokenizer_type": "HuggingFaceTokenizer",
    "log_interval": 10,
}
# What stands for the parts that need CUDA.
CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "cross_entropy_loss_fusion": False,
}


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Megatron's ``extra_args_provider``: our flags, and our defaults for Megatron's."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    taken = {a.dest for a in parser._actions}
    defaults = DEFAULTS | (CPU_DEFAULTS if platform.is_active() else {})
    unknown = sorted(set(defaults) - taken)
    if unknown:
        raise ConfigError([f"this megatron-core has no option {name}" for name in unknown])
    parser.set_defaults(**defaults)
    for options in OPTIONS:
        ArgumentGroupFactory(options).build_group(parser, title=f"megasink: {options.__name__}")
    parser.error = _raise  # type: ignore[method-assign]

    def parse_and_keep_unknown(*args: Any, **kwargs: Any) -> Namespace:
        namespace, unknown = parser.parse_known_args(*args, **kwargs)
        namespace.unknown_flags = unknown
        return namespace

    # An unknown flag is one of the problems that are told together.
    parser.parse_args = parse_and_keep_unknown  # type: ignore[method-assign,assignment]
    return parser


def _raise(message: str) -> NoReturn:
    raise ConfigError([f"{message} (megasink train --full-help lists every flag)"])


def defaults() -> Namespace:
    """Every option with its default on this platform, not validated: what no flag parses to."""
    return parse_apart([])


def parse_apart(argv: Sequence[str]) -> Namespace:
    """As `parse_known`, and this process keeps its own command line."""
    before = sys.argv
    try:
        return parse_known(argv)
    finally:
        sys.argv = before


def parse_known(argv: Sequence[str]) -> Namespace:
    """A command line with Megatron's flags and ours, parsed and not validated.

    Raises:
        ConfigError: a flag without its value, or with one of another type.
    """
    from megatron.training import arguments

    # Megatron reads sys.argv.
    sys.argv = [sys.argv[0], *argv]
    return arguments.parse_args(add_arguments)
