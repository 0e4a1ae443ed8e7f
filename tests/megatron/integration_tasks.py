"""Tasks for the workers: the layer spec as stacks call it, and a block of docs/integrations.md."""

import dataclasses
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

OPTIONS = "MEGASINK_OPTIONS"
SINK: dict[str, Any] = {"attention_variant": "sink", "head_balance_coeff": 0.5}


def _config(**more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    shape = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    fields = {"attention_dropout": 0.0, "use_cpu_initialization": True, "pipeline_dtype": None}
    return TransformerConfig(**shape | fields | more)


def _environment(text: str | None) -> Any:
    """The variable with the options, or without."""
    kept = {name: value for name, value in os.environ.items() if name != OPTIONS}
    return mock.patch.dict(os.environ, kept | ({OPTIONS: text} if text else {}), clear=True)


def _message(call: Callable[[], Any]) -> str:
    from megasink.errors import UserError

    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing"


def every_call() -> dict[str, Any]:
    """What the spec is in every form of call; None where it equals that of the plain call.

    The last layer is of experts alone, so that the spec of each stage is another one.
    """
    import torch
    from megatron.training.models.gpt import GPTModelConfig

    from megasink.megatron import HeadBalance, layer_spec

    config = _config(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        num_moe_experts=2,
        moe_layer_freq=[0, 0, 0, 1],
        add_bias_linear=False,
        transformer_impl="local",
    )
    HeadBalance(config, **SINK)
    found: dict[str, Any] = {}
    for stage in (0, 1):
        plain = layer_spec(config, vp_stage=stage)
        cores = {
            layer.submodules.self_attention.submodules.core_attention.__name__
            for layer in plain.layer_specs
        }
        mlps = [type(layer.submodules.mlp).__name__ for layer in plain.layer_specs]
        model = GPTModelConfig(transformer=config, vocab_size=8)
        arguments = Namespace(spec=["megasink.megatron", "layer_spec"])
        others = {
            "positional": layer_spec(config, stage),
            "model configuration": layer_spec(model, vp_stage=stage),
            "arguments": layer_spec(arguments, config, stage),
        }
        found[f"stage {stage}"] = cores, mlps, repr(plain)
        found |= {
            f"{name} {stage}": None if repr(spec) == repr(plain) else repr(spec)
            for name, spec in others.items()
        }
    return found


def sources() -> dict[str, Any]:
    """The coefficient that a config gets from each place and each pair of them, or the message."""
    from megasink.megatron import HeadBalance, layer_spec

    def coefficient(
        attached: dict[str, Any] | None, given: object, text: str | None, again: bool = False
    ) -> Any:
        config = _config(transformer_impl="local")
        if attached is not None:
            HeadBalance(config, **attached)

        def call() -> None:
            layer_spec(Namespace(megasink_options=given), config, None)
            if again:  # as for the second virtual stage
                layer_spec(Namespace(megasink_options=given), config, None)

        with _environment(text):
            message = _message(call)
        return config.head_balance_coeff if message == "nothing" else message

    json = '{"attention_variant": "sink", "head_balance_coeff": 0.5}'
    other = '{"head_balance_coeff": 0.25}'
    return {
        "config": coefficient(SINK, None, None),
        "arguments": coefficient(None, SINK, None),
        "environment": coefficient(None, None, json),
        "environment, twice": coefficient(None, None, json, again=True),
        "all agree": coefficient(SINK, SINK, json),
        "none": coefficient(None, None, None),
        "config, environment": coefficient(SINK, None, other),
        "config, arguments": coefficient(SINK, {"head_balance_coeff": 0.25}, None),
        "arguments, environment": coefficient(None, SINK, other),
        "no JSON": coefficient(None, None, "{attention_variant: sink}"),
        "no object": coefficient(None, None, '["sink"]'),
        "no dict": coefficient(None, "sink", None),
        "unknown": coefficient(None, None, '{"attention_varient": "sink"}'),
        "text": coefficient(None, None, '{"head_balance_coeff": "0.5", "sink_token": 1}'),
    }


def not_ours() -> dict[str, str]:
    """What a stack is told that calls the spec in another way."""
    from megatron.core.transformer import MLATransformerConfig
    from megatron.training.models.gpt import GPTModelConfig
    from megatron.training.models.hybrid import HybridModelConfig

    from megasink.megatron import HeadBalance, layer_spec, stack_spec

    attached = _config(transformer_impl="local")
    HeadBalance(attached, **SINK)
    mla = MLATransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    hybrid = HybridModelConfig(transformer=attached, vocab_size=8)
    predicting = GPTModelConfig(transformer=_config(mtp_num_layers=1), vocab_size=8)
    with _environment('{"attention_variant": "sink"}'):
        return {
            "arguments alone": _message(lambda: layer_spec(Namespace(num_layers=1))),
            "arguments, config": _message(lambda: layer_spec(Namespace(), attached)),
            "stack": _message(lambda: stack_spec(Namespace())),
            "hybrid": _message(lambda: layer_spec(hybrid)),
            "MLA": _message(lambda: layer_spec(mla)),
            "prediction": _message(lambda: layer_spec(predicting)),
            "a copy": _message(lambda: layer_spec(dataclasses.replace(attached))),
        }
