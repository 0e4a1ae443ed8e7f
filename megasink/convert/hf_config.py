"""config.json <-> Architecture, for the keys that all architectures of transformers share.

Types and ranges of a file are checked before anything is computed from them. An architecture
without a target is refused with the reason, by its name or by its keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from packaging.version import Version
from pydantic import Field

from megasink.config import FACTORS
from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import NAMES, MegasinkOptions
from megasink.convert.rope import config_of_rope, read_rope, rope_problems
from megasink.convert.targets import TARGETS
from megasink.convert.targets.target import Config, Target
from megasink.convert.unread_config_entries import Recorded, unread
from megasink.errors import UserError
from megasink.files.checked_fields import (
    Count,
    Epsilon,
    Experts,
    Layers,
    Number,
    Positive,
    Share,
    check,
    fields,
)
from megasink.files.json_file import read_object

# Null means "not given" in files of transformers; these keys are required.
_SIZES = "vocab_size hidden_size intermediate_size num_attention_heads max_position_embeddings"
_COUNTS = (
    "num_key_value_heads head_dim sliding_window moe_intermediate_size decoder_sparse_step "
    "full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
    "linear_num_key_heads linear_num_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim n_group topk_group"
)
_NUMBERS_OF_EXPERTS = (
    "num_experts num_local_experts num_experts_per_tok shared_intermediate_size "
    "shared_expert_intermediate_size max_window_layers n_routed_experts n_shared_experts "
    "first_k_dense_replace dense_intermediate_size num_nextn_predict_layers"
)
_FLAGS = (
    "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob "
    "use_sandwich_norm use_attention_gate use_cache output_router_logits qk_norm qkv_bias "
    "linear_bias zero_centred_norms rope_interleave use_qk_norm"
)
_NUMBERS = (
    "embedding_multiplier logits_scaling residual_multiplier swiglu_alpha swiglu_limit "
    "final_logit_softcapping router_aux_loss_coef router_jitter_noise routed_scaling_factor"
)
_TOKEN = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_TOKENS = dict.fromkeys(
    ("eos_token_id", "bos_token_id", "pad_token_id"), _TOKEN | list[_TOKEN] | None
)
_DTYPE = Literal["float32", "bfloat16", "float16"] | None
_ROPE: dict[str, Any] = {
    "rope_type": str | None,
    "type": str | None,
    "rope_theta": Positive | None,
    "factor": Positive | None,
    "partial_rotary_factor": Share | None,
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Number | None),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), Positive | None),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Number | None),
    "truncate": bool | None,
    "original_max_position_embeddings": Count | None,
}
_OF_LAYERS = fields(_ROPE)
_PARAMETERS = fields(
    _ROPE | dict.fromkeys(("full_attention", "sliding_attention"), _OF_LAYERS | None)
)

_OURS = ("attention", "zero_centred", "bias", "qkv_bias", "shared_gate")
CONFIG_FIELDS = fields(
    {hint: kind | None for hint, kind in get_type_hints(MegasinkOptions).items()}
    | dict.fromkeys(_SIZES.split(), Count)
    | dict.fromkeys(_COUNTS.split(), Count | None)
    | dict.fromkeys(_NUMBERS_OF_EXPERTS.split(), Experts | None)
    | dict.fromkeys(_FLAGS.split(), bool | None)
    | dict.fromkeys(_NUMBERS.split(), Number | None)
    | _TOKENS
    | dict.fromkeys(("dtype", "torch_dtype"), _DTYPE)
    | dict.fromkeys(("rms_norm_eps", "norm_eps"), Epsilon | None)
    | dict.fromkeys(("rope_parameters", "rope_scaling"), _PARAMETERS | None)
    | dict.fromkeys(("attention_dropout", "partial_rotary_factor"), Share | None)
    | {
        "model_type": str,
        "num_hidden_layers": Layers,
        "hidden_act": str | None,
        "initializer_range": Annotated[float, Field(ge=0, le=1e3)] | None,
        "rope_theta": Positive | None,
        "layer_types": list[str] | None,
        "layer_rope_theta": list[Annotated[float, Field(ge=0, le=1e18)] | None] | None,
        "mlp_only_layers": list[int] | None,
        "attention_multiplier": Positive | None,
        **dict.fromkeys(FACTORS, Positive | None),
        "attention_variant": str,
        "attention_variant_layers": list[bool | int] | None,
        "gate_granularity": str | None,
        "quantization_config": dict[str, Any] | None,
        "megasink": fields({"attention": str, **dict.fromkeys(_OURS[1:], bool)}) | None,
    }
)
"""Entries of config.json whose values are checked."""
GENERATION_FIELDS = fields(
    _TOKENS
    | dict.fromkeys(("use_cache", "do_sample"), bool | None)
    | dict.fromkeys(("temperature", "top_p", "repetition_penalty"), Number | None)
    | dict.fromkeys(("top_k", "max_new_tokens", "max_length"), Experts | None)
)
"""Entries of generation_config.json that the next export keeps."""


# {key of every config.json: field of Architecture}
_COMMON = {
    "vocab_size": "vocabulary",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "groups",
    "head_dim": "head_dim",
    "hidden_act": "activation",
    "max_position_embeddings": "positions",
    "initializer_range": "init_std",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "dtype": "dtype",
}
# Key of a config.json that only megasink reads, for models that the architecture confuses.
OURS = "megasink"


def config_of(model: Architecture, target: Target, special_tokens: Mapping[str, Any]) -> Config:
    """Return the config.json of an exported model."""
    rope = config_of_rope(model)
    scaled = rope["rope_type"] != "default"
    config = {
        "architectures": [target.architecture],
        "model_type": target.name,
        **{key: getattr(model, name) for key, name in _COMMON.items()},
        "rope_theta": model.rope_base,
        "rope_parameters": rope,
        # The name before transformers 5.
        **({"rope_scaling": rope} if scaled and not target.custom_code else {}),
        "attention_dropout": 0.0,
        "use_cache": True,
        **special_tokens,
        **target.write_config(model),
    }
    if not target.custom_code:
        ours = {name: getattr(model, name) for name in _OURS}
        config[OURS] = {k: v for k, v in ours.items() if v or k != "shared_gate"}
    return config


# By architecture; transformers reads each.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def prediction_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of the names of multi-token prediction, which transformers ignores."""
    first, number = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
    return ("mtp.", *(f"model.layers.{first + n}." for n in range(number)))


def architecture_from(config: Mapping[str, Any]) -> tuple[Architecture, Target]:
    """Return the model that a config.json describes."""
    if (name := config.get("model_type", "")) not in TARGETS:
        raise UserError(
            f"model_type {name!r} cannot be imported: {why_not(config)}. "
            f"Supported: {', '.join(TARGETS)}"
        )
    target, given = TARGETS[name], config
    config = Recorded({**target.defaults, **given})
    if older := config.get("rope_scaling"):  # it goes first in transformers too
        config["rope_parameters"] = older
    experts = {name: config[name] for name in _EXPERTS if config.get(name)}
    try:
        problems = [*target.refusals(config), *_rope_problems(config, target)]
        method = (config.get("quantization_config") or {}).get("quant_method")
        if config.get("quantization_config") and method not in target.quantized:
            problems.append(f"weights quantized with {method}: save them in bfloat16 first")
        if len(set(experts.values())) > 1:
            problems.append(" and ".join(f"{name} {count}" for name, count in experts.items()))
        if problems:
            raise UserError(
                f"this {target.name} has features that megasink does not support: "
                f"{'; '.join(problems)}"
            )
        fields = _common(config) | target.read_config(config)
        if fields.get("experts") and not fields.get("topk"):
            raise KeyError("num_experts_per_tok")
    except KeyError as error:
        raise UserError(f"config.json of this {target.name} lacks {error}") from error
    ours = {} if target.custom_code else config.get(OURS) or {}
    fields |= {name: ours[name] for name in _OURS if name in ours}
    model = Architecture(**fields)
    if misfits := target.problems(model):
        raise UserError(f"config.json does not describe a {target.name}: {misfits[0]}")
    known = {*target.keys, *target.fixed, *target.defaults, *_without_effect(config, target)}
    if left := unread(given, config.read | known):
        raise UserError(
            f"config.json has entries that megasink does not read for a {target.name}: "
            f"{'; '.join(left)}. Remove those that do not change the model"
        )
    return model, target


def _without_effect(config: Mapping[str, Any], target: Target) -> set[str]:
    """Return the entries that have no effect beside the others, or are options of megasink."""
    keys = {OURS, *(NAMES if target.custom_code else ())}
    if not config.get("use_sliding_window", True):
        keys |= {"sliding_window", "max_window_layers", "layer_types"}
    if config.get("layer_types"):
        keys.add("max_window_layers")
    return keys


def _rope_problems(config: Mapping[str, Any], target: Target) -> list[str]:
    if target.rope_by_layer:
        return []  # the target checks them
    problems = rope_problems(config, target.rope_scaling)
    share = (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    share = config.get("partial_rotary_factor", 1.0) if share is None else share
    if share != 1.0 and target.partial_rotary is None and not target.custom_code:
        problems.append(f"partial_rotary_factor {share}")
    return problems


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the common keys, with the defaults of transformers 4 and 5."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    vocabulary, layers = config["vocab_size"], config["num_hidden_layers"]
    missing = {
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        # transformers unpacks to bfloat16.
        "dtype": config.get("torch_dtype")
        or ("bfloat16" if config.get("quantization_config") else "float32"),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    values = missing | {key: config[key] for key in _COMMON if config.get(key) is not None}
    return {
        **{name: values[key] for key, name in _COMMON.items()},
        "padded": -(-vocabulary // 128) * 128,
        **read_rope(config),
        "windows": (None,) * layers,
    }


def transformers_has(target: Target) -> None:
    """Check that the installed transformers supports an exported architecture."""
    import transformers

    missing = not target.custom_code and not hasattr(transformers, target.architecture)
    if missing or Version(transformers.__version__) < Version(target.since):
        raise UserError(
            f"transformers {transformers.__version__} is too old for {target.architecture}: "
            f"install transformers>={target.since} or use --no-verify"
        )


def read_config(folder: Path) -> Config:
    """Read the config.json of a Hugging Face folder."""
    path = folder / "config.json"
    try:
        config = read_object(path)
    except UserError as error:
        raise UserError(f"{path} is not a model configuration: {error}") from error
    # Another architecture may have other types; `architecture_from` refuses it by name.
    if not isinstance(name := config.get("model_type"), str) or name in TARGETS:
        check(CONFIG_FIELDS, config, str(path))
    return config


_BY_NAME = {
    "olmo2": "it normalizes the outputs of attention and FFN, not their inputs, and its "
    "qk-norm spans all heads, while Megatron's spans one head",
    "mimo_v2_flash": "its values are narrower than its keys, and its windowed layers differ from "
    "the others in groups and RoPE base, which all of Megatron's layers share",
    "llama4": "its layers without RoPE and its chunked attention have no counterpart",
    "gpt2": "its weights are transposed, with query, key and value in one tensor, and its FFN and "
    "norms have biases",
}
# {key: meaning of a value other than null, false and 0}
_BY_KEY = {
    "is_encoder_decoder": "it is an encoder-decoder model",
    "vision_config": "it also reads images",
    "audio_config": "it also reads audio",
    "kv_lora_rank": "it has multi-head latent attention",
    "linear_num_value_heads": "it has layers of linear attention",
    "state_size": "it has state-space layers",
    "ssm_state_size": "it has state-space layers",
    "mamba_d_state": "it has state-space layers",
    "use_parallel_residual": "attention and FFN run in parallel on the same input",
    "parallel_attn": "attention and FFN run in parallel on the same input",
    "attn_logit_softcapping": "its attention scores have a soft cap",
    "alibi": "it adds distance biases to its scores (ALiBi)",
    "clip_qkv": "its queries, keys and values are clamped",
    "type_vocab_size": "it is an encoder: its attention is not causal",
    "query_pre_attn_scalar": "its attention has another scale, and its norms add 1 to their gains",
}


def why_not(config: Mapping[str, Any]) -> str:
    """Return why megasink cannot import the model of a config.json, without a subject."""
    if named := _BY_NAME.get(str(config.get("model_type"))):
        return named
    reasons = dict.fromkeys(text for key, text in _BY_KEY.items() if config.get(key))
    return "; ".join(reasons) or "no conversion target has its architecture"
