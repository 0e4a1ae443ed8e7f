"""Targets with the experts of DeepSeek-V3: it, Kimi-K2, GLM-4.5, dots.llm1.

The first two have latent attention, the others have grouped queries.
"""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture, Latent
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.rope import rope_of, yarn_of_latent
from megasink.convert.targets import rows
from megasink.convert.targets.softmax_attention import read_windowed
from megasink.convert.targets.target import Config, Target, register
from megasink.convert.transforms import GateUp
from megasink.convert.weight_table import LAYERS, Row, row

_EPSILON = 1e-6  # of the norms of latents, whatever config.json says
_SIZES = {
    "moe_intermediate_size": "ffn",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "topk",
}
_DEFAULTS: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_DEFAULTS |= {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}


def _table(model: Architecture) -> tuple[Row, ...]:
    return rows.of_layers(model, _same_layers) if model.dense_layers else _same_layers(model)


def _same_layers(model: Architecture) -> tuple[Row, ...]:
    ffn = _experts(model) if model.experts else rows.ffn(model)
    return rows.decoder(model, ffn, _attention(model) if model.latent else None)


def _attention(model: Architecture) -> tuple[Row, ...]:
    without = ("q_proj",) if model.latent and model.latent.queries else ("q_down", "q_up")
    return tuple(
        row(f"{LAYERS}{key}weight", f"{rows.LAYER}{name}weight")
        for key, name in rows.LATENT.items()
        if not any(f"linear_{part}" in key for part in without)
    )


def _experts(model: Architecture) -> tuple[Row, ...]:
    shared, at = f"{rows.MLP}shared_experts.", f"{rows.LAYER}mlp.shared_experts."
    both = (f"{at}gate_proj.weight", f"{at}up_proj.weight")
    return (
        *rows.experts(),
        row(f"{rows.MLP}router.expert_bias", f"{rows.LAYER}mlp.gate.e_score_correction_bias"),
        row(f"{shared}linear_fc1.weight", *both, transform=GateUp()),
        row(f"{shared}linear_fc2.weight", f"{at}down_proj.weight"),
    )


def _config(model: Architecture) -> Config:
    groups = model.expert_groups or (1, 1)
    return {
        **(model.latent.as_config() if model.latent else {}),
        "intermediate_size": model.dense_ffn or model.ffn,
        "first_k_dense_replace": model.dense_layers,
        "n_shared_experts": model.shared_ffn // model.ffn,
        "n_group": groups[0],
        "topk_group": groups[1],
        "routed_scaling_factor": model.options.moe_router_topk_scaling_factor or 1.0,
        "num_nextn_predict_layers": 0,
    }


def _read_dots(config: Mapping[str, Any]) -> dict[str, Any]:
    windowed = config["sliding_window"] is not None
    return {**_read(config), **read_windowed({**config, "use_sliding_window": windowed})}


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    dense, groups = config["first_k_dense_replace"], config["n_group"]
    factor = config["routed_scaling_factor"]
    return {
        "dense_layers": dense,
        "dense_ffn": config["intermediate_size"] if dense else 0,
        "ffn": config["moe_intermediate_size"],
        "shared_ffn": config["n_shared_experts"] * config["moe_intermediate_size"],
        "expert_groups": (groups, config["topk_group"]) if groups > 1 else None,
        "options": _options(MegasinkOptions(moe_router_topk_scaling_factor=factor)),
    }


def _options(given: MegasinkOptions) -> MegasinkOptions:
    factor = given.moe_router_topk_scaling_factor
    return MegasinkOptions(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=None if factor == 1.0 else factor,
    )


def _refused(config: Mapping[str, Any]) -> list[str]:
    if missing := [key for key in (*_SIZES, *_DEFAULTS) if config.get(key) is None]:
        return [f"no value for {' and '.join(missing)}"]
    problems = []
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        problems.append("no layer with experts (first_k_dense_replace)")
    both = sum(config.get(f"qk_{part}_head_dim") or 0 for part in ("nope", "rope"))
    if config.get("qk_head_dim", both) not in (None, both):
        problems.append(f"qk_head_dim {config['qk_head_dim']} (not {both})")
    rope = rope_of(config)
    if rope["rope_type"] == "yarn" and bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        problems.append("YaRN with mscale without mscale_all_dim, or vice versa")
    return problems


def _misfits(model: Architecture) -> list[str]:
    problems = []
    if model.latent and model.norm_eps != _EPSILON:
        problems.append(f"the norms of its latents have an epsilon of {_EPSILON}")
    problems += yarn_of_latent(model.yarn) if model.latent else []
    if not model.shared_ffn or model.shared_ffn % model.ffn:
        problems.append("the width of its shared expert is a multiple of an expert's width")
    if model.expert_groups and model.topk // model.expert_groups[1] != 2:
        problems.append("a group's score sums two experts' scores, so topk must be 2 per group")
    if model.topk == 1:
        problems.append(
            "with topk 1 its expert has probability 1, but Megatron's has the score's sigmoid"
        )
    return problems


_EVERY: dict[str, Any] = {
    "attention": ("vanilla",),
    "table": _table,
    "keys": _SIZES,
    "config": _config,
    "read": _read,
    "refused": _refused,
    "misfits": _misfits,
    "moe": True,
    "options": _options,
    "shared_expert": True,
    "first_dense": True,
}

register(
    Target(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        since="5.23",
        fixed=_ROUTER | {"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
        defaults=_DEFAULTS
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        | dict(zip(Latent.KEYS, (1536, 512, 128, 64, 128), strict=True)),
        qk_norm=True,
        rope_scaling=("yarn",),
        latent=True,
        **_EVERY | {"read": lambda config: {**_read(config), **Latent.read(config)}},
    )
)
register(
    Target(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        since="5.23",
        fixed={"norm_topk_prob": True},
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        partial_rotary=0.5,
        qk_norm=None,
        qkv_bias=None,
        rope_scaling=(),
        **_EVERY | {"keys": _SIZES | {"use_qk_norm": "qk_norm", "attention_bias": "qkv_bias"}},
    )
)
register(
    Target(
        name="dots1",
        architecture="Dots1ForCausalLM",
        since="5.23",
        fixed=_ROUTER | {"attention_bias": False, "norm_topk_prob": True},
        defaults=_DEFAULTS
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "num_key_value_heads": 32}
        | {"n_shared_experts": None}
        | {"sliding_window": 4096, "max_window_layers": 62},
        qk_norm=True,
        windows="mixed",
        **_EVERY | {"read": _read_dots},
    )
)
