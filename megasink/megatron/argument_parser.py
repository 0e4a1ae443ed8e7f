"""Megatron's argument parser with megasink's options and defaults."""

import importlib.util
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from megasink import cpu
from megasink.config import MODEL_OPTIONS
from megasink.errors import ConfigError, nearest
from megasink.options.command_parser import CLOSE, Reading, dashed, unknown_flags
from megasink.options.dataclass_flags import escaped
from megasink.options.megatron_flags import REFUSED, flags_refused, having
from megasink.options.run_options import add_options
from megasink.upstream import fused_kernels
from megasink.upstream.training_patches import HELP

# Megatron defaults to 0.1 for both dropouts; attention dropout breaks the identity between a gate
# and the LSE (P0.9). Megatron's default for context parallelism, p2p, has no windows or documents.
# None: whether any layout can load the optimizer's state, training/checkpoint_writer.py chooses.
# On SIGTERM, which schedulers send before they kill, a checkpoint is saved. Without a persistent
# worker Megatron disables --async-save; the other strategy needs an extra package.
# Under Megatron's default, blockwise, Muon's updates depend on the tensor-parallel size.
# Megatron has no default for --eval-interval and divides by it.
DEFAULTS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "cp_comm_type": ["all_gather"],
    "ckpt_format": "torch_dist",
    "dist_ckpt_optim_fully_reshardable": None,
    "exit_signal_handler": True,
    "use_persistent_ckpt_worker": True,
    "async_strategy": "mcore",
    "tokenizer_type": "HuggingFaceTokenizer",
    "log_interval": 10,
    "eval_interval": 1000,
    "muon_tp_mode": "duplicated",
}
# Replacements for the parts that need CUDA.
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


_CHANGES_THE_MODEL = {
    *having("shape", "model", "described"),
    *(name for refused in REFUSED.values() for name, *_ in refused),
    *(field.name for options in MODEL_OPTIONS for field in fields(options)),
}
_PLAIN = (None, int, float, str, bool)


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add megasink's flags and defaults; Megatron's ``extra_args_provider``."""
    taken = {a.dest for a in parser._actions}
    defaults = DEFAULTS | (fused_kernels.defaults() if cpu.cuda_present() else CPU_DEFAULTS)
    unknown = sorted(set(defaults) - taken)
    if unknown:
        raise ConfigError(f"this megatron-core has no option {name}" for name in unknown)
    parser.set_defaults(**defaults)
    for action in parser._actions:
        action.help = escaped(action.help or "")
        if action.type not in _PLAIN and callable(action.type):
            action.type = _valued(action.type)
    add_options(parser)
    # Flag errors are reported together with all other problems.
    parser.parse_args = lambda: read_flags(parser, sys.argv[1:])  # type: ignore[method-assign,assignment]
    return parser


def read_flags(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Return the parsed flags, with their problems in ``flag_problems``.

    ``given_flags`` holds the dests of all, ``refused_flags`` those of rejected flags and of the
    flags meant by unknown ones.
    """
    argv, problems = dashed(parser, argv)
    read = Reading(parser, argv)
    args = read.namespace
    refused = flags_refused("always")
    unknown = unknown_flags(parser, read.unknown, refused, _CHANGES_THE_MODEL)
    known = parser._option_string_actions
    words = (word.partition("=")[0] for word in argv)
    args.given_flags = {known[word].dest for word in words if word in known}
    args.flag_problems = [*problems, *unknown, *read.problems]
    # Do not also report a misspelled flag as missing.
    meant = (nearest(word, known, cutoff=CLOSE) for word in read.unknown if word[:1] in "-–—")
    args.refused_flags = read.refused | {known[name].dest for name in meant if name}
    if not hasattr(args, "yaml_cfg"):
        raise ConfigError(args.flag_problems)
    # Megatron would read the file while parsing and replace every flag with its contents.
    if args.yaml_cfg is not None:
        args.flag_problems.append(f"--yaml-cfg {args.yaml_cfg}: pass flags instead")
        args.yaml_cfg = None
    if args.enable_msc and importlib.util.find_spec("multistorageclient") is None:
        args.flag_problems.append(
            "--enable-msc needs the package multi-storage-client, which is not installed: "
            "install it or drop the flag"
        )
        args.enable_msc = False
    return args


def _valued(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a Megatron argument type so that argparse handles its KeyError or AssertionError."""

    def value(text: str) -> Any:
        try:
            return convert(text)
        except Exception as error:
            raise ValueError(text) from error

    return value


def parse_apart(argv: Sequence[str]) -> Namespace:
    """Parse flags without validation and without changing this process's command line."""
    before = sys.argv
    try:
        args = parse_known(argv)
    finally:
        sys.argv = before
    if args.flag_problems:
        raise ConfigError(args.flag_problems)
    return args


def parse_known(argv: Sequence[str]) -> Namespace:
    """Parse a command line without validation; return the namespace of `read_flags`."""
    from megatron.core.msc_utils import MultiStorageClientFeature
    from megatron.training import arguments

    # Megatron reads sys.argv.
    sys.argv = [sys.argv[0], *argv]
    with nullcontext() if "--help" in argv else HELP.replacing(_get_field_docstrings=_no_texts):
        args = arguments.parse_args(add_arguments)
    MultiStorageClientFeature.disable()  # parsing enables it for all: see train.dataset
    return args


def _no_texts(factory: Any, options: type) -> dict[str, str]:
    return {}


def flag_parser() -> ArgumentParser:
    """Return the parser of all flags of Megatron and megasink, with megasink's defaults."""
    from megatron.training import arguments

    with HELP.replacing(_get_field_docstrings=_no_texts):
        return add_arguments(arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False)))


def known_flags() -> dict[str, Any]:
    """Return {flag: argparse's `nargs` of it} for all flags of Megatron and megasink."""
    actions = flag_parser()._option_string_actions.items()
    return {name: action.nargs for name, action in actions if name.startswith("--")}
