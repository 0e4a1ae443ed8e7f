"""The options of megasink on a TransformerConfig, and what they change in Megatron's own fields."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from megasink.attention.variants import foreign_options, is_variant, variant
from megasink.attention.variants.gate_options import is_megatrons_output_gate
from megasink.balance.loss import without_gradient, wrong_alone, wrong_together
from megasink.config import FACTORS, IGNORED, TRANSFORMER_OPTIONS
from megasink.errors import ConfigError

# The function of each FFN activation, and whether the FFN is a gated linear unit.
FFN_ACTIVATIONS = {
    "relu": (F.relu, False),
    "gelu": (F.gelu, False),
    "silu": (F.silu, False),
    "reglu": (F.relu, True),
    "geglu": (F.gelu, True),
    "swiglu": (F.silu, True),
}
# Megatron's flags for T5's bias, which are missing from its own TransformerConfig.
_RELATIVE = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
# Options beyond a TransformerConfig and a layer spec, and how to get them.
_ELSEWHERE = {
    "attention_variant_layers": "set it in a MegasinkTransformerConfig",
    "sinusoidal_position_embedding": "build the model with megasink.megatron.model",
    "embedding_norm": "build the model with megasink.megatron.model",
    "logit_softcap": "build the model with megasink.megatron.model",
    "sink_lr_mult": "give core_attention.softmax_offset its own parameter group",
    "sink_weight_decay": "give core_attention.softmax_offset its own parameter group",
}


_DROPOUT = "it breaks the identity between gate and log-sum-exp (Megatron's default is 0.1)"


def has_options(config: Any) -> bool:
    """Return whether a config has the options of megasink."""
    return hasattr(config, "attention_variant")


def give_options(config: Any, options: dict[str, Any]) -> None:
    """Set the options of megasink on a config of Megatron's own class, in place."""
    fields = {f.name: f for kind in TRANSFORMER_OPTIONS for f in dataclasses.fields(kind)}
    problems = [f"{name} is not a megasink option" for name in options if name not in fields]
    for name, value in ((name, options[name]) for name in options if name in fields):
        choices, default = fields[name].metadata.get("choices"), fields[name].default
        if choices and value is not None and value not in choices:
            problems.append(f"{name} is {value!r}, not one of {', '.join(choices)}")
        elif not choices and default is not None and not _is_like(value, default):
            problems.append(f"{name} is {value!r}, not a {type(default).__name__}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} is {value!r}, which is not finite")
        elif name in FACTORS and isinstance(value, int | float) and value <= 0:
            problems.append(f"{name} is {value!r}: use a number above 0")
    defaults = {name: field.default for name, field in fields.items()}
    given = defaults | {name: options[name] for name in options if name in fields}
    if not problems:
        problems += _wrong_together(given, defaults, config)
    if has_options(config):
        problems.append(
            f"{type(config).__name__} has the options of megasink as its fields: set "
            f"{', '.join(options)} there"
        )
    problems += [
        f"{name} has no effect in your own loop: {how}"
        for name, how in _ELSEWHERE.items()
        if given[name] != defaults[name]
    ]
    if is_variant(given["attention_variant"]):
        problems += _against(config, SimpleNamespace(**given))
    if problems:
        raise ConfigError(problems)
    for name, default in _RELATIVE.items():
        if not hasattr(config, name):
            setattr(config, name, default)
    for name, value in given.items():
        setattr(config, name, value)
    apply_options(config)
    check_parameters(config)


def _against(config: Any, given: Any) -> list[str]:
    """Return the fields of a config that contradict the options, or that attention would ignore."""
    record = variant(given.attention_variant)
    gate = is_megatrons_output_gate(given)
    fine = (
        *IGNORED,
        ("attention_dropout", 0.0, _DROPOUT),
        ("multi_latent_attention", False, "this core attention supports only GQA and MHA"),
        ("cuda_graph_impl", "none", "a replayed graph neither counts tokens nor updates the loss"),
        ("attention_output_gate", gate, f"attention_variant {record.name!r} has a different gate"),
    )
    problems = [
        f"{name} {value!r}: {why}; set it to {wanted!r}"
        for name, wanted, why in fine
        if (value := getattr(config, name, wanted)) not in (wanted, False, None)
    ]
    if config.softmax_type not in (type(config).softmax_type, record.softmax_type):
        problems.append(
            f"softmax_type {config.softmax_type!r}: attention_variant {record.name!r} would drop "
            "these sinks: use attention_variant 'sink', or softmax_type 'vanilla'"
        )
    return problems


def refuse_late(config: Any) -> None:
    """Raise ConfigError for a field that was set after the options were checked."""
    if config.attention_dropout:
        late = "set it to 0.0 before HeadBalance(config)"
        raise ConfigError([f"attention_dropout {config.attention_dropout!r}: {_DROPOUT}: {late}"])


def _wrong_together(given: dict[str, Any], defaults: dict[str, Any], config: Any) -> list[str]:
    """Return the problems of values that have the right type but no effect, or a harmful one."""
    problems, name = [], given["attention_variant"]
    if is_variant(name):  # else refused with the names of all
        foreign = sorted(n for n in foreign_options(variant(name)) if given[n] != defaults[n])
        problems += [f"{n} has no effect with attention_variant {name!r}" for n in foreign]
    names = ("head_balance_coeff", "head_balance_shared_heads", "head_balance_shared_refresh")
    of_loss = {n: given[n] for n in names}
    return problems + wrong_alone(of_loss) + wrong_together(of_loss, config.num_attention_heads)


def _is_like(value: object, default: object) -> bool:
    """Return whether a value has the type of a default; a whole number is a float as well."""
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)


def apply_options(config: Any) -> None:
    """Set Megatron's own fields that the options of a config change."""
    record = variant(config.attention_variant)
    # Megatron's inference reads it; megatron/inference_guard.py rejects unsupported models.
    config.softmax_type = record.softmax_type
    loss = {"head_balance_coeff": config.head_balance_coeff}
    if problems := without_gradient(loss, record, config.attention_similarity):
        raise ConfigError(problems)
    if config.ffn_activation is not None:
        config.activation_func, config.gated_linear_unit = FFN_ACTIVATIONS[config.ffn_activation]
        # Megatron's other fused kernels only have the tanh approximation of gelu.
        config.bias_activation_fusion &= config.ffn_activation == "swiglu"
    if config.zero_init_outputs:
        config.output_layer_init_method = torch.nn.init.zeros_
    if is_megatrons_output_gate(config):
        config.attention_output_gate = True


def check_parameters(config: Any) -> None:
    """Check that parameters divide among the ranks, and the options of switch heads."""
    if (config.switch_heads, config.switch_experts, config.switch_top_k) != ("none", 1, 1):
        from megasink.attention.variants.switch_options import switch_problems

        if problems := list(switch_problems(config, config.num_query_groups, str)):
            raise ConfigError(problems)
    for parameter in variant(config.attention_variant).parameters:
        parameter.local_shape(config, config.tensor_model_parallel_size)
