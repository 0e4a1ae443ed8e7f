"""Command line -> Megatron's arguments and ours, with every problem in one message."""

import contextlib
import io
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megasink import platform
from megasink.config import OPTIONS
from megasink.errors import ConfigError
from megasink.train import checks, run_dir
from megasink.train.checks.blocks import set_gated_unit
from megasink.train.checks.data import pin_vocabulary
from megasink.train.checks.gates import match_ffn_width

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


def parse(argv: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Parse and validate a command line.

    Args:
        argv: flags without the program's name.

    Returns:
        the namespace, with ``padded_vocab_size`` pinned to the tokenizer, and the arguments by
        which the run is known, as they were given (Megatron derives some of them).

    Raises:
        ConfigError: every problem found, before anything is built.
    """
    from megatron.training import arguments

    # Required by Megatron for tensor parallelism on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = _parse(argv)
    problems = checks.problems(args)
    if problems:
        raise ConfigError(problems)
    identity = run_dir.identity_of(args)
    run_dir.set_paths(args)
    pin_vocabulary(args)
    set_gated_unit(args)
    with _without_argument_list():
        try:
            arguments.validate_args(args)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise ConfigError([f"Megatron refuses this configuration: {_text(error)}"]) from error
    if args.match_ffn_width:
        match_ffn_width(args)
    return args, identity


def defaults() -> Namespace:
    """Every option with its default on this platform, not validated: what no flag parses to."""
    before = sys.argv
    try:
        return _parse([])
    finally:
        sys.argv = before


def _parse(argv: Sequence[str]) -> Namespace:
    from megatron.training import arguments

    # Megatron reads sys.argv.
    sys.argv = [sys.argv[0], *argv]
    return arguments.parse_args(add_arguments)


def _text(error: BaseException) -> str:
    """The message, or, for a bare assertion, the line that it stands on."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return str(error) or f"{Path(last.filename).name}:{last.lineno}: {last.line}"


@contextlib.contextmanager
def _without_argument_list() -> Iterator[None]:
    """validate_args prints all 600 arguments: they are in config.json, so they are not repeated."""
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink):
        yield
    for line in sink.getvalue().splitlines():
        if "WARNING" in line or line.startswith("using world size"):
            print(line, flush=True)
