"""RoPE and its scalings, between config.json and Architecture."""

import math
from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture, Yarn

# Llama 3's scaling in Megatron; only the factor is an option
# (megatron/core/models/common/embeddings/rotary_pos_embedding.py:98).
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_ORIGINAL = "original_max_position_embeddings"
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL}
# The keys that are read for each type; in the default one, others have no effect.
_READ = {
    "llama3": _PLAIN | _LLAMA3.keys(),
    "yarn": _PLAIN
    | {"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"},
}


def config_of_rope(model: Architecture) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.rope_factor is not None:
        rope |= {**_LLAMA3, "factor": model.rope_factor}
    return rope | (config_of_yarn(model.yarn) if model.yarn else {})


def config_of_yarn(yarn: Yarn) -> dict[str, Any]:
    """Return YaRN's entries of ``rope_parameters``."""
    both = {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    if (yarn.mscale, yarn.mscale_all_dim) == (Yarn.mscale, Yarn.mscale_all_dim):
        both = {}
    elif not all(both.values()):  # then transformers reads neither
        both = {"attention_factor": temperature(yarn)}
    return {
        "rope_type": "yarn",
        "factor": yarn.factor,
        _ORIGINAL: yarn.original,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.round_range,
        **both,
    }


def yarn_of_latent(yarn: Yarn | None) -> list[str]:
    """Return the problems of YaRN's numbers in latent attention."""
    wrong = {
        "YaRN in its latent attention rounds the range (truncate)": yarn and not yarn.round_range,
        "YaRN in its latent attention needs mscale if mscale_all_dim is set": (
            yarn and yarn.mscale_all_dim and not yarn.mscale
        ),
    }
    return [text for text, is_so in wrong.items() if is_so]


def temperature(yarn: Yarn) -> float:
    """Return the factor of cosines and sines, as Megatron's `_yarn_get_concentration_factor`."""
    log = 0.1 * math.log(max(yarn.factor, 1.0))
    return (yarn.mscale * log + 1.0) / (yarn.mscale_all_dim * log + 1.0)


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a config.json, with rope_type and rope_theta."""
    rope = dict(config.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if not rope.keys() & {"attention_factor", "mscale", "mscale_all_dim"} and (
        [rope["rope_type"], rope.get("factor"), rope.get(_ORIGINAL)]
        == ["yarn", 1.0, config["max_position_embeddings"]]
    ):
        rope["rope_type"] = "default"  # YaRN with a factor of 1 is this
    return rope


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Architecture."""
    rope = rope_of(config)
    return {
        "rope_base": float(rope["rope_theta"]),
        "rope_factor": rope["factor"] if rope["rope_type"] == "llama3" else None,
        "yarn": _read_yarn(rope) if rope["rope_type"] == "yarn" else None,
    }


def _read_yarn(rope: Mapping[str, Any]) -> Yarn:
    given = rope.get("attention_factor")
    both: tuple[Any, Any] = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, all_dim = both if all(both) else (Yarn.mscale, Yarn.mscale_all_dim)
    if given is not None:
        if rope["factor"] > 1:  # `rope_problems` refuses others
            mscale = round((given - 1.0) / (0.1 * math.log(rope["factor"])), 12)
        all_dim = 0.0
    truncate = rope.get("truncate")
    return Yarn(
        factor=float(rope["factor"]),
        original=rope[_ORIGINAL],
        beta_fast=float(rope.get("beta_fast") or Yarn.beta_fast),
        beta_slow=float(rope.get("beta_slow") or Yarn.beta_slow),
        round_range=True if truncate is None else truncate,
        mscale=float(mscale),
        mscale_all_dim=float(all_dim),
    )


def rope_problems(config: Mapping[str, Any], supported: tuple[str, ...]) -> list[str]:
    """Return what megasink does not support of a config.json's RoPE, given the types it does."""
    rope = rope_of(config)
    if by_layer := [name for name, value in rope.items() if isinstance(value, dict)]:
        return [f"RoPE parameters per layer type ({', '.join(by_layer)})"]
    kind = rope["rope_type"]
    if kind == "default":
        return []
    if kind not in supported:
        return [f"RoPE scaling {kind!r}"]
    unread = [name for name in rope if name not in _READ[kind] and rope[name] is not None]
    problems = [f"RoPE scaling {kind!r} with {name} {rope[name]}" for name in unread]
    if kind == "yarn":
        return problems + _yarn_problems(rope)
    return problems + [
        f"RoPE scaling with {name} {rope.get(name)} (Megatron's is {value})"
        for name, value in _LLAMA3.items()
        if rope.get(name) != value
    ]


def _yarn_problems(rope: Mapping[str, Any]) -> list[str]:
    missing = [name for name in ("factor", _ORIGINAL) if rope.get(name) is None]
    if missing:
        return [f"RoPE scaling 'yarn' without {' and '.join(missing)}"]
    problems = []
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("RoPE scaling 'yarn' with partial_rotary_factor, which Megatron ignores")
    if rope.get("attention_factor") not in (None, 1.0) and rope["factor"] <= 1:
        problems.append(
            f"attention_factor {rope['attention_factor']} with a RoPE factor of {rope['factor']}"
        )
    return problems
