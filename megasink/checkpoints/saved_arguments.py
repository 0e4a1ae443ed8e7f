"""Read a run's arguments from its config.json for a single process.

Only those that describe the model are taken: an untrusted run cannot choose where this process
writes or which modules it imports.
"""

import dataclasses
import enum
import functools
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasink.attention.variants import is_variant, names
from megasink.checkpoints.model_arguments import MODEL
from megasink.errors import UserError, unknown_name
from megasink.files.json_file import read_object
from megasink.megatron.argument_parser import CPU_DEFAULTS, parse_apart
from megasink.megatron.hybrid_pattern import SUPPORTED, layers_of
from megasink.options.megatron_flags import REFUSED, given_of, having
from megasink.plugins import advice

# Layout and compute options: this process keeps its own values.
_THIS_PROCESS = frozenset({"attention_kernel", "run_dir", "resume", "device", *having("process")})
# Arguments that the model configuration reads under other names (tests/security checks the list),
# and their replacements in the text.
_OTHER_NAMES = frozenset({"replace_tokens_at", "replace_tokens_with", *having("described")})
# Also read for a model, but these name files, folders and modules to import.
_NOT_TAKEN = frozenset(name for name, *_ in REFUSED["in a saved model"])
# String values must be names of choices, never a path, module or expression.
_NAME = re.compile(r"[\w+-]*")
_LAYERS = "hybrid_layer_pattern"
# The pattern is taken without its pipeline stages.
_PATTERN = re.compile(f"[{re.escape(SUPPORTED)}]*")
# A model trained with TransformerEngine's fused modules or in FP8 runs on Megatron's own modules
# and in its own dtype on any machine; the checkpoint format is the same.
_PLAIN_MODULES = {**CPU_DEFAULTS, "fp8": None, "fp4": None}
_PLAIN_MODULES |= {"fp8_param_gather": False, "fp4_param_gather": False}
# Megatron applies these in evaluation, too: a token's logits would depend on chance, or on the
# other tokens of the batch.
_OF_TRAINING = (
    ("moe_expert_capacity_factor", None, "drops tokens"),
    ("moe_pad_expert_input_to_capacity", False, "pads experts"),
    ("moe_input_jitter_eps", None, "adds noise to the routing"),
    ("moe_router_force_load_balancing", False, "routes at random"),
    ("moe_router_force_biased", None, "routes at random"),
)


def read_arguments(config: Path) -> dict[str, Any]:
    """Read the arguments from a run's config.json."""
    try:
        saved = dict(read_object(config)["arguments"])
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{config} is not the configuration of a megasink run ({error!r})"
        ) from error
    missing = {"attention_variant", "padded_vocab_size", "ffn_hidden_size"} - set(saved)
    if missing:
        raise UserError(
            f"{config} is not from a megasink run: it lacks {', '.join(sorted(missing))}"
        )
    from megasink.checkpoints.saved_fields import check_fields  # imports pydantic, 0.1 s

    check_fields(saved, str(config))
    if not is_variant(saved["attention_variant"]):
        unknown = unknown_name("--attention-variant", saved["attention_variant"], names())
        raise UserError(f"{config}: {unknown}; {advice(saved.get('plugin'))}")
    return saved


def single_process_arguments(saved: Mapping[str, Any]) -> Namespace:
    """Return Megatron's arguments for the model of :func:`read_arguments`, in one process."""
    import torch  # a wrong config.json is reported without it

    args = parse_apart([])
    wanted, refused = describing(), []
    if isinstance(pattern := saved.get(_LAYERS), str):
        saved = {**saved, _LAYERS: layers_of(pattern)}
    for name, value in saved.items():
        # Data types: params_dtype is set below, the others belong to the optimizer.
        if str(value).startswith("torch."):
            continue
        # A name without a default was derived, or is not an argument.
        if name in wanted and name not in _OTHER_NAMES and not hasattr(args, name):
            continue
        if name in wanted and _is_plain(value, _PATTERN if name == _LAYERS else _NAME):
            setattr(args, name, _typed(getattr(args, name, None), value))
        elif name in wanted or (name in _NOT_TAKEN and value != vars(args).get(name, value)):
            refused.append(f"{name} {str(value)[:80]!r}")
    if refused:
        print(
            "megasink: these arguments of the run do not describe a model and are ignored: "
            f"{', '.join(sorted(refused))}",
            file=sys.stderr,
        )
    for flag, value, what in given_of(args, _OF_TRAINING):
        _say_once(f"{flag} {value} {what} in training: off here, as in an export")
    vars(args).update(_PLAIN_MODULES, **{name: off for name, off, _ in _OF_TRAINING})
    if args.window_size is not None:
        args.window_size = tuple(args.window_size)
    args.params_dtype = (
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    )
    args.perform_initialization = False  # the weights come from the checkpoint
    args.virtual_pipeline_model_parallel_size = None
    return args


@functools.cache
def _say_once(line: str) -> None:
    print(f"megasink: {line}", file=sys.stderr)


def describing() -> frozenset[str]:
    """Return the names of the arguments that define a run's model."""
    from megasink.megatron.config import MegasinkTransformerConfig

    fields = {field.name for field in dataclasses.fields(MegasinkTransformerConfig)}
    wanted = (_OTHER_NAMES | fields | set(MODEL)) - _THIS_PROCESS - _NOT_TAKEN
    return wanted - {"tokenizer_model"}  # a folder, loaded separately (run_tokenizer.py)


def _is_plain(value: Any, word: re.Pattern[str] = _NAME) -> bool:
    if isinstance(value, list):
        return all(_is_plain(entry, word) for entry in value)
    if isinstance(value, str):
        return word.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)


def _typed(default: Any, value: Any) -> Any:
    """Convert a JSON value to the type that argparse would produce."""
    if isinstance(default, enum.Enum) and isinstance(value, str):
        return type(default)[value]
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return value
