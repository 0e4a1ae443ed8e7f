"""The options that a stack hands to a spec, by its config, its arguments or the environment."""

import json
import os
from typing import Any

from megatron.core.transformer import TransformerConfig

from megasink.errors import ConfigError, UserError
from megasink.megatron.head_balance import HeadBalance

OPTIONS = "MEGASINK_OPTIONS"
ARGUMENT = "megasink_options"


def with_options(config: Any, spec: str, arguments: Any = None) -> Any:
    """Return the TransformerConfig of a config that a stack hands to a spec, with its options."""
    transformer = getattr(config, "transformer", config)
    name = type(config).__name__
    if not isinstance(transformer, TransformerConfig):
        raise UserError(
            f"{spec} needs a TransformerConfig, or a model configuration that has one as "
            f"`transformer`, not a {name}: call {spec}(config)"
        )
    if hasattr(config, "hybrid_stack_spec") and spec == "layer_spec":
        raise UserError(f"layer_spec builds GPT models, but {name} builds a hybrid: use stack_spec")
    own_builder = getattr(config, "builder", "megasink").startswith("megasink")
    if transformer is not config and transformer.mtp_num_layers and not own_builder:
        raise UserError(
            f"mtp_num_layers {transformer.mtp_num_layers}: {config.builder} ignores the spec in "
            "layers of multi-token prediction: use `megasink train` for them"
        )
    _find_options(transformer, arguments)
    return transformer


def _find_options(config: TransformerConfig, arguments: Any) -> None:
    """Attach a HeadBalance with the options of the stack to a config that has none.

    The first of these that exists is used, and the others must agree: the config, the arguments
    that a stack passes (``args.megasink_options``), the environment.
    """
    others = {f"args.{ARGUMENT}": getattr(arguments, ARGUMENT, None), OPTIONS: _of_environment()}
    others = {place: options for place, options in others.items() if options is not None}
    for place, options in others.items():
        if not isinstance(options, dict):
            raise UserError(f"{place} must map option names to values, got {options!r}")
    if not isinstance(vars(config).get("statistics"), HeadBalance):
        if not others:
            raise UserError(
                f"layer_spec: this {type(config).__name__} has no megasink options, so the loss "
                'would be 0: call megasink.megatron.HeadBalance(config, attention_variant="sink", '
                "head_balance_coeff=1e-4) before the model is built (dataclasses.replace drops the "
                f"options), or set {OPTIONS} to the same options as a JSON object"
            )
        HeadBalance(config, **next(iter(others.values()))).install()
    problems = [
        f"{name} is {value!r} in {place}, but {getattr(config, name, 'no option')!r} in the "
        f"config: the config takes precedence, so remove {name} from {place}"
        for place, options in others.items()
        for name, value in options.items()
        if getattr(config, name, None) != value
    ]
    if problems:
        raise ConfigError(problems)


def _of_environment() -> Any:
    text = os.environ.get(OPTIONS)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{OPTIONS} is not JSON ({error}): {text}") from error
