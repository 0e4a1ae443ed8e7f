"""Find the options of a layer spec: in the config, the arguments, or the environment.

The first of these that exists has them (docs/integrations.md):

1. the config: a :class:`HeadBalance` that is attached to it;
2. the arguments of a stack that hands them to the spec: ``args.megasink_options``, a dict;
3. the environment variable MEGASINK_OPTIONS, a JSON object.

What another one says besides must be the same.
"""

import json
import os
from typing import Any

from megatron.core.transformer import TransformerConfig

from megasink.errors import ConfigError, UserError
from megasink.megatron.head_balance import HeadBalance

OPTIONS = "MEGASINK_OPTIONS"
ARGUMENT = "megasink_options"


def transformer_config(config: Any) -> Any:
    """Return the TransformerConfig from the arguments that a stack passes to its spec."""
    transformer = getattr(config, "transformer", config)
    name = type(config).__name__
    if not isinstance(transformer, TransformerConfig):
        raise UserError(
            "layer_spec needs a TransformerConfig, or a model configuration that has one as "
            f"`transformer`, not a {name}: call layer_spec(config), layer_spec(config, "
            "vp_stage=...) or layer_spec(args, config, vp_stage)"
        )
    if hasattr(config, "hybrid_stack_spec"):
        raise UserError(
            f"layer_spec is for GPT models, but {name} builds a hybrid stack: use `megasink "
            "train --hybrid-layer-pattern`"
        )
    own_builder = getattr(config, "builder", "megasink").startswith("megasink")
    if transformer is not config and transformer.mtp_num_layers and not own_builder:
        raise UserError(
            f"mtp_num_layers {transformer.mtp_num_layers}: {config.builder} ignores the spec in "
            "layers of multi-token prediction: use `megasink train` for them"
        )
    return transformer


def find_options(config: TransformerConfig, arguments: Any) -> None:
    """Attach a HeadBalance with the options of the stack to a config that has none.

    Args:
        config: Of the model that the spec is for.
        arguments: What the stack hands over; None if it hands over nothing.
    """
    others = {f"args.{ARGUMENT}": getattr(arguments, ARGUMENT, None), OPTIONS: _of_environment()}
    others = {place: options for place, options in others.items() if options is not None}
    for place, options in others.items():
        if not isinstance(options, dict):
            raise UserError(f"{place} must map the names of options to values, not be {options!r}")
    if not isinstance(vars(config).get("statistics"), HeadBalance):
        if not others:
            raise UserError(
                f"layer_spec: this {type(config).__name__} has no megasink options, so the loss "
                "would be 0: call megasink.megatron.HeadBalance(config, "
                'attention_variant="sink", head_balance_coeff=1e-4) before the model is built '
                f"(a copy by dataclasses.replace has none), or set {OPTIONS} to the same options "
                "as a JSON object"
            )
        HeadBalance(config, **next(iter(others.values())))
    problems = [
        f"{name} is {value!r} in {place}, and {getattr(config, name, 'no option')!r} in the "
        f"config: the config comes first, so remove it from {place}"
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
