"""Targets with a learned sink logit per head: Granite, Flint, GPT-OSS."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megasink.convert.architecture import Architecture, Yarn
from megasink.convert.rope import config_of_yarn
from megasink.convert.targets import rows
from megasink.convert.targets.target import (
    EXPERTS,
    Config,
    Target,
    no_layer_types,
    register,
    window_of,
    windows_from,
)
from megasink.convert.transforms import InterleavedGateUp, Transposed
from megasink.convert.weight_table import Row, row

SINKS = ("sink", "off-by-one")
# Megatron has no such multipliers, and no biases there.
GRANITE = {
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
}


def _decoder(
    model: Architecture, ffn: tuple[Row, ...] = (), sinks: str = "sinks"
) -> tuple[Row, ...]:
    attention = (*rows.attention(model), *rows.sinks(model, sinks))
    return rows.decoder(model, ffn or rows.ffn(model), attention)


def _granite_moe(model: Architecture) -> tuple[Row, ...]:
    at, shared_at = f"{rows.LAYER}block_sparse_moe.", f"{rows.LAYER}shared_mlp."
    ffn = (
        row(f"{rows.MLP}router.weight", f"{at}router.weight"),
        row(f"{rows.EXPERTS}linear_fc1.weight", f"{at}experts.gate_up_proj"),
        row(f"{rows.EXPERTS}linear_fc2.weight", f"{at}experts.down_proj"),
    )
    shared = (
        row(f"{rows.MLP}shared_experts.linear_fc1.weight", f"{shared_at}input_linear.weight"),
        row(f"{rows.MLP}shared_experts.linear_fc2.weight", f"{shared_at}output_linear.weight"),
    )
    return _decoder(model, (*ffn, *shared) if model.shared_ffn else ffn)


def _gpt_oss(model: Architecture) -> tuple[Row, ...]:
    at, fc = f"{rows.LAYER}mlp.", f"{rows.EXPERTS}linear_fc"
    biases = (
        row(f"{rows.MLP}router.bias", f"{at}router.bias"),
        row(f"{fc}1.bias", f"{at}experts.gate_up_proj_bias", transform=InterleavedGateUp()),
        row(f"{fc}2.bias", f"{at}experts.down_proj_bias"),
    )
    # Engines look for every bias, whatever attention_bias says.
    zeros = {
        **{f"self_attn.{x}_proj.bias": (model.groups * model.head_dim,) for x in "kv"},
        "self_attn.q_proj.bias": (model.heads * model.head_dim,),
        "self_attn.o_proj.bias": (model.hidden,),
        "mlp.router.bias": (model.experts,),
        "mlp.experts.gate_up_proj_bias": (model.experts, 2 * model.ffn),
        "mlp.experts.down_proj_bias": (model.experts, model.hidden),
    }
    ffn = (
        row(f"{rows.MLP}router.weight", f"{at}router.weight"),
        row(f"{fc}1.weight", f"{at}experts.gate_up_proj", transform=InterleavedGateUp()),
        row(f"{fc}2.weight", f"{at}experts.down_proj", transform=Transposed()),
        *(biases if model.bias else rows.zeros(model, rows.LAYER, zeros)),
    )
    return _decoder(model, ffn)


def _granite(model: Architecture) -> Config:
    return {
        # It scales scores by this instead of head_dim ** -0.5.
        "attention_multiplier": model.head_dim**-0.5,
        # It makes a mask of this width even if no layer uses it.
        "sliding_window": window_of(model) or model.positions,
        "layer_rope_theta": [model.rope_base] * model.layers,
    }


def _granite_refused(config: Mapping[str, Any]) -> list[str]:
    heads, problems = config["num_attention_heads"], no_layer_types(config)
    scale = (config.get("head_dim") or config["hidden_size"] // heads) ** -0.5
    multiplier = config.get("attention_multiplier", 1.0)
    if abs(multiplier - scale) > 1e-6 * scale:
        problems.append(f"attention_multiplier {multiplier} (not {scale:.6g})")
    thetas = set(config.get("layer_rope_theta") or [])
    if len(thetas) > 1 or 0 in thetas:
        problems.append("layer_rope_theta: layers with different RoPE, or without it")
    return problems


def _read_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    thetas = config.get("layer_rope_theta")
    return {"rope_base": float(thetas[0])} if thetas else {}


def _flint(model: Architecture) -> Config:
    return {
        # Its layers have RoPE only with a window; a window of all positions hides nothing.
        "layer_types": ["sliding_attention"] * model.layers,
        "sliding_window": window_of(model) or model.positions,
        "mlp_only_layers": list(range(model.layers)),
        "num_experts": 0,
    }


def _visible(config: Mapping[str, Any]) -> dict[str, Any]:
    most = config["max_position_embeddings"]
    return {"windows": tuple(None if w and w >= most else w for w in windows_from(config))}


def _flint_refused(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if set(config.get("layer_types") or ["full_attention"]) != {"sliding_attention"}:
        problems.append("layer_types: layers without a window have no RoPE")
    if config.get("mlp_only_layers") != list(range(config["num_hidden_layers"])):
        problems.append("mlp_only_layers: experts with a sigmoid router")
    return problems


def _gpt_oss_config(model: Architecture) -> Config:
    # Engines read YaRN's keys whatever the rope_type says; with a factor of 1 it is plain RoPE.
    plain = Yarn(factor=1.0, original=model.positions, round_range=False)
    yarn = config_of_yarn(model.yarn or plain)
    return {
        "attention_bias": True,
        "hidden_act": "silu",
        # Engines put a window into layers 0, 2, 4, ...; one of all positions hides nothing.
        "layer_types": (["sliding_attention", "full_attention"] * model.layers)[: model.layers],
        "sliding_window": window_of(model) or model.positions,
        "rope_parameters": {"rope_theta": model.rope_base, **yarn},
        "rope_scaling": yarn,
    }


def _read_gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", True))
    return {"activation": "gpt-oss", "bias": bias, "qkv_bias": bias, **_visible(config)}


def _gpt_oss_refused(config: Mapping[str, Any]) -> list[str]:
    problems = no_layer_types(config)
    if not config.get("rope_parameters"):
        problems.append("no rope_parameters (transformers then uses YaRN with a factor of 32)")
    return problems


_with_sinks = partial(Target, attention=SINKS)
_granite_swa = partial(
    _with_sinks,
    since="5.15",
    fixed=GRANITE,
    config=_granite,
    read=_read_granite,
    refused=_granite_refused,
    windows="mixed",
)

for target in (
    _granite_swa(
        name="granite_swa",
        architecture="GraniteSWAForCausalLM",
        table=_decoder,
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        engines=("", "", "activation"),
    ),
    _with_sinks(
        name="flint",
        architecture="FlintForCausalLM",
        since="5.21",
        # The name in released files; transformers renames it, vLLM does not.
        table=partial(_decoder, sinks="softmax_offset"),
        fixed={"attention_bias": False},
        config=_flint,
        read=_visible,
        refused=_flint_refused,
        qk_norm=True,
        windows="all",
        engines=("activation", None, None),
    ),
    _granite_swa(
        name="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        table=_granite_moe,
        keys={**EXPERTS, "shared_intermediate_size": "shared_ffn"},
        moe=True,
        shared_expert=True,
        engines=("activation head_dim", "activation head_dim scaling", "activation"),
    ),
    _with_sinks(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        since="4.55",
        table=_gpt_oss,
        keys=EXPERTS,
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        defaults={"rms_norm_eps": 1e-5},
        config=_gpt_oss_config,
        read=_read_gpt_oss,
        refused=_gpt_oss_refused,
        moe=True,
        bias=True,
        activations=("gpt-oss",),
        windows="alternating",
        rope_scaling=("yarn",),
        quantized=("mxfp4",),
        engines=("epsilon", "", ""),
    ),
):
    register(target)
