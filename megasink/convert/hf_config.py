"""config.json <-> Architecture, for the keys that all architectures of transformers share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from megasink.checked_fields import check
from megasink.convert.architecture import Architecture
from megasink.convert.hf_fields import CONFIG
from megasink.convert.not_imported import why_not
from megasink.convert.targets import TARGETS
from megasink.convert.targets.target import Config, Target
from megasink.errors import UserError
from megasink.json_file import read_object

# Llama 3's scaling in Megatron; only the factor is an option
# (megatron/core/models/common/embeddings/rotary_pos_embedding.py:98).
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
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
# Key of a config.json that only megasink reads: what the architecture does not distinguish.
OURS = "megasink"


def config_of(model: Architecture, target: Target, special_tokens: Mapping[str, Any]) -> Config:
    """Return the config.json of an exported model.

    Args:
        special_tokens: bos_token_id, eos_token_id and pad_token_id, each an id or None.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.rope_factor is not None:
        rope |= {**_LLAMA3, "factor": model.rope_factor}
    config = {
        "architectures": [target.architecture],
        "model_type": target.name,
        **{key: getattr(model, name) for key, name in _COMMON.items()},
        "rope_theta": model.rope_base,
        "rope_parameters": rope,
        "attention_dropout": 0.0,
        "use_cache": True,
        **special_tokens,
        **target.write_config(model),
    }
    if not target.custom_code:
        config[OURS] = {"attention": model.attention, "zero_centred": model.zero_centred}
    return config


def architecture_from(config: Mapping[str, Any]) -> tuple[Architecture, Target]:
    """Return the model that a config.json describes.

    Raises:
        UserError: the architecture has no target, or megasink's model cannot express it.
    """
    target = _target(config)
    problems = [*target.refusals(config), *_rope_problems(config, target), *_quantized(config)]
    if problems:
        raise UserError(
            f"this {target.name} has features that megasink does not support: {'; '.join(problems)}"
        )
    try:
        fields = _common(config) | target.read_config(config)
    except KeyError as error:
        raise UserError(f"the config.json of this {target.name} has no {error}") from error
    ours = {} if target.custom_code else config.get(OURS) or {}
    fields |= {name: ours[name] for name in ("attention", "zero_centred") if name in ours}
    model = Architecture(**fields)
    if misfits := target.problems(model):
        raise UserError(f"config.json does not describe a {target.name}: {misfits[0]}")
    return model, target


def _target(config: Mapping[str, Any]) -> Target:
    name = config.get("model_type", "")
    if name in TARGETS:
        return TARGETS[name]
    known = ", ".join(TARGETS)
    raise UserError(
        f"model_type {name!r} cannot be imported: {why_not(config)}. Supported: {known}"
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters, from the keys of transformers 5 or of older versions."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _rope_problems(config: Mapping[str, Any], target: Target) -> list[str]:
    rope = _rope(config)
    if by_layer := [name for name, value in rope.items() if isinstance(value, dict)]:
        if target.rope_by_layer:
            return []  # the target checks them
        return [f"RoPE parameters per layer type ({', '.join(by_layer)})"]
    kind = rope["rope_type"]
    if kind == "default":
        return []
    if kind != "llama3" or not target.rope_scaling:
        return [f"RoPE scaling {kind!r}"]
    return [
        f"RoPE scaling with {name} {rope.get(name)} (Megatron's is {value})"
        for name, value in _LLAMA3.items()
        if rope.get(name) != value
    ]


def _quantized(config: Mapping[str, Any]) -> list[str]:
    found = config.get("quantization_config")
    if not found:
        return []
    return [f"weights quantized with {found.get('quant_method')}: save them in bfloat16 first"]


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the common keys, with the defaults of transformers 4 and 5."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope, vocabulary, layers = _rope(config), config["vocab_size"], config["num_hidden_layers"]
    missing = {
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "dtype": config.get("torch_dtype") or "float32",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    values = missing | {key: config[key] for key in _COMMON if config.get(key) is not None}
    return {
        **{name: values[key] for key, name in _COMMON.items()},
        "padded": -(-vocabulary // 128) * 128,
        "rope_base": float(rope["rope_theta"]),
        "rope_factor": rope["factor"] if rope["rope_type"] == "llama3" else None,
        "windows": (None,) * layers,
    }


def transformers_has(target: Target) -> None:
    """Check that the installed transformers runs an architecture as it is exported.

    Raises:
        UserError: it does not.
    """
    import transformers

    missing = not target.custom_code and not hasattr(transformers, target.architecture)
    if missing or Version(transformers.__version__) < Version(target.since):
        raise UserError(
            f"transformers {transformers.__version__} is too old for {target.architecture}: "
            f"install transformers>={target.since} or use --no-verify"
        )


def read_config(folder: Path) -> Config:
    """Read the config.json of a Hugging Face folder.

    Raises:
        UserError: the file cannot be read, or a field of an architecture that can be imported has
            the wrong type or range.
    """
    path = folder / "config.json"
    try:
        config = read_object(path)
    except UserError as error:
        raise UserError(f"{path} is not a model configuration: {error}") from error
    # Another architecture may have other types; `architecture_from` refuses it by name.
    if not isinstance(name := config.get("model_type"), str) or name in TARGETS:
        check(CONFIG, config, str(path))
    return config
