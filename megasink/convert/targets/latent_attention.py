"""Targets with latent attention: DeepSeek-V3, and Kimi-K2 of the same architecture."""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.latent import Latent
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.rope import rope_of
from megasink.convert.table import Row, row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.target import Config, Target
from megasink.convert.transforms import GateUp

_EPSILON = 1e-6  # of the norms of latents, whatever config.json says
_WIDTHS = {
    "q_lora_rank": "queries",
    "kv_lora_rank": "keys",
    "qk_nope_head_dim": "plain",
    "qk_rope_head_dim": "rotated",
    "v_head_dim": "values",
}


def _table(model: Architecture) -> tuple[Row, ...]:
    return rows.of_layers(model, _same_layers) if model.dense_layers else _same_layers(model)


def _same_layers(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(
        model, _experts(model) if model.experts else rows.ffn(model), _attention(model)
    )


def _attention(model: Architecture) -> tuple[Row, ...]:
    ours, at = rows.ATTENTION, f"{rows.LAYER}self_attn."
    found = [row(f"{ours}linear_kv_down_proj.weight", f"{at}kv_a_proj_with_mqa.weight")]
    if model.latent is None or model.latent.queries is None:
        found.append(row(f"{ours}linear_q_proj.weight", f"{at}q_proj.weight"))
        kinds: tuple[str, ...] = ("kv",)
    else:
        found.append(row(f"{ours}linear_q_down_proj.weight", f"{at}q_a_proj.weight"))
        kinds = ("q", "kv")
    for x in kinds:
        up = f"{ours}linear_{x}_up_proj."
        found.append(row(f"{up}layer_norm_weight", f"{at}{x}_a_layernorm.weight"))
        found.append(row(f"{up}weight", f"{at}{x}_b_proj.weight"))
    return (*found, row(f"{ours}linear_proj.weight", f"{at}o_proj.weight"))


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
    latent, groups = model.latent, model.expert_groups or (1, 1)
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "first_k_dense_replace": model.dense_layers,
        "n_shared_experts": model.shared_ffn // model.ffn,
        "n_group": groups[0],
        "topk_group": groups[1],
        "routed_scaling_factor": model.options.moe_router_topk_scaling_factor or 1.0,
        "num_nextn_predict_layers": 0,
        **{key: getattr(latent, name) for key, name in _WIDTHS.items()},
    }


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    widths: dict[str, Any] = {name: config.get(key) for key, name in _WIDTHS.items()}
    latent = Latent(**widths)
    dense, groups = config["first_k_dense_replace"], config["n_group"]
    factor = config["routed_scaling_factor"]
    return {
        "latent": latent,
        "head_dim": latent.rotated,
        "groups": config["num_attention_heads"],
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
    problems = []
    if config["first_k_dense_replace"] >= config["num_hidden_layers"]:
        problems.append("no layer with experts (first_k_dense_replace)")
    rope = rope_of(config)
    if rope["rope_type"] == "yarn" and bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        problems.append("YaRN with mscale without mscale_all_dim, or vice versa")
    return problems


def _misfits(model: Architecture) -> list[str]:
    problems = []
    if model.norm_eps != _EPSILON:
        problems.append(f"the norms of its latents have an epsilon of {_EPSILON}")
    if not model.shared_ffn or model.shared_ffn % model.ffn:
        problems.append("its shared expert is a multiple of an expert's width")
    if model.expert_groups and model.topk // model.expert_groups[1] != 2:
        problems.append("a group's score is the sum of two, so each chosen group has two experts")
    return problems


register(
    Target(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        since="5.23",
        attention=("vanilla",),
        table=_table,
        keys={
            "moe_intermediate_size": "ffn",
            "n_routed_experts": "experts",
            "num_experts_per_tok": "topk",
        },
        fixed={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
        defaults={
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
        },
        config=_config,
        read=_read,
        refused=_refused,
        misfits=_misfits,
        moe=True,
        qk_norm=True,
        options=_options,
        rope_scaling=("yarn",),
        shared_expert=True,
        latent=True,
    )
)
