"""Architectures whose softmax has a learned logit per head: Granite, Flint, GPT-OSS."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from megasink.convert.architecture import Architecture
from megasink.convert.table import Row, row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.target import Config, Target, layer_types, window_of, windows_from
from megasink.convert.transforms import Constant, InterleavedGateUp, Transposed

SINKS = ("sink", "off-by-one")
_STACKED = f"{rows.LAYER}block_sparse_moe.experts."


def _dense(model: Architecture, sinks: str = "sinks") -> tuple[Row, ...]:
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.sinks(model, sinks),
        *rows.ffn(model),
        *rows.head(model),
    )


def _granite_moe(model: Architecture) -> tuple[Row, ...]:
    shared: tuple[Row, ...] = ()
    if model.shared_ffn:
        at = f"{rows.LAYER}shared_mlp."
        shared = (
            row(f"{rows.MLP}shared_experts.linear_fc1.weight", f"{at}input_linear.weight"),
            row(f"{rows.MLP}shared_experts.linear_fc2.weight", f"{at}output_linear.weight"),
        )
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.sinks(model),
        row(f"{rows.MLP}router.weight", f"{rows.LAYER}block_sparse_moe.router.weight"),
        row(f"{rows.EXPERTS}linear_fc1.weight", f"{_STACKED}gate_up_proj"),
        row(f"{rows.EXPERTS}linear_fc2.weight", f"{_STACKED}down_proj"),
        *shared,
        *rows.head(model),
    )


def _gpt_oss(model: Architecture) -> tuple[Row, ...]:
    at = f"{rows.LAYER}mlp."
    # Megatron's experts have no biases here; those of GPT-OSS are always there.
    dtype = getattr(torch, model.dtype)
    zeros = (
        ("router.bias", (model.experts,)),
        ("experts.gate_up_proj_bias", (model.experts, 2 * model.ffn)),
        ("experts.down_proj_bias", (model.experts, model.hidden)),
    )
    fc1 = f"{rows.EXPERTS}linear_fc1.weight"
    fc2 = f"{rows.EXPERTS}linear_fc2.weight"
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.sinks(model),
        row(f"{rows.MLP}router.weight", f"{at}router.weight"),
        row(fc1, f"{at}experts.gate_up_proj", transform=InterleavedGateUp()),
        row(fc2, f"{at}experts.down_proj", transform=Transposed()),
        *(Row((), (f"{at}{name}",), Constant(shape, dtype)) for name, shape in zeros),
        *rows.head(model),
    )


def _granite(model: Architecture) -> Config:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        # Its scores are multiplied by this, not by head_dim ** -0.5.
        "attention_multiplier": model.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": layer_types(model),
        # A mask of this width is made even where no layer asks for it.
        "sliding_window": window_of(model) or model.positions,
        "layer_rope_theta": [model.rope_base] * model.layers,
    }


def _granite_refused(config: Mapping[str, Any]) -> list[str]:
    heads = config["num_attention_heads"]
    scale = (config.get("head_dim") or config["hidden_size"] // heads) ** -0.5
    wanted = {
        "attention_multiplier": scale,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }
    found = [
        f"{name} {config[name]} (not {value:.6g})"
        for name, value in wanted.items()
        if abs(config.get(name, 1.0) - value) > 1e-6 * value
    ]
    thetas = set(config.get("layer_rope_theta") or [])
    if len(thetas) > 1 or 0 in thetas:
        found.append("layer_rope_theta: layers with different RoPE, or none")
    return found + [name for name in ("attention_bias", "mlp_bias") if config.get(name)]


def _read_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"attention": "sink", "windows": windows_from(config)}
    thetas = config.get("layer_rope_theta")
    if thetas:
        found["rope_base"] = float(thetas[0])
    return found


def _read_granite_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_read_granite(config),
        "experts": config["num_local_experts"],
        "topk": config["num_experts_per_tok"],
        "shared_ffn": config.get("shared_intermediate_size") or 0,
    }


def _granite_moe_config(model: Architecture) -> Config:
    return {
        **_granite(model),
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "shared_intermediate_size": model.shared_ffn,
    }


def _flint(model: Architecture) -> Config:
    return {
        "attention_bias": False,
        # Its layers have RoPE only where they have a window: one that hides nothing is none.
        "layer_types": ["sliding_attention"] * model.layers,
        "sliding_window": window_of(model) or model.positions,
        "mlp_only_layers": list(range(model.layers)),
        "num_experts": 0,
    }


def _read_flint(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config["sliding_window"]
    visible = None if window >= config["max_position_embeddings"] else window
    return {
        "attention": "sink",
        "qk_norm": True,
        "windows": (visible,) * config["num_hidden_layers"],
    }


def _flint_refused(config: Mapping[str, Any]) -> list[str]:
    found = []
    layers = config["num_hidden_layers"]
    if set(config.get("layer_types") or ["full_attention"]) != {"sliding_attention"}:
        found.append("layer_types: its layers without a window have no RoPE")
    if config.get("mlp_only_layers") != list(range(layers)):
        found.append("its experts, which a sigmoid routes to")
    return found


def _gpt_oss_config(model: Architecture) -> Config:
    return {
        "attention_bias": False,
        "hidden_act": "silu",
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "layer_types": layer_types(model),
        "sliding_window": window_of(model) or model.positions,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def _read_gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention": "sink",
        "activation": "gpt-oss",
        "experts": config["num_local_experts"],
        "topk": config["num_experts_per_tok"],
        "windows": windows_from(config),
    }


def _gpt_oss_refused(config: Mapping[str, Any]) -> list[str]:
    found = []
    if config.get("attention_bias", True):
        found.append("attention_bias: Megatron would have biases in the experts too")
    if (config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        found.append("swiglu_alpha or swiglu_limit")
    return found


register(
    Target(
        name="granite_swa",
        architecture="GraniteSWAForCausalLM",
        since="5.15",
        attention=SINKS,
        table=_dense,
        config=_granite,
        read=_read_granite,
        refused=_granite_refused,
        windows="mixed",
    )
)
register(
    Target(
        name="flint",
        architecture="FlintForCausalLM",
        since="5.21",
        attention=SINKS,
        # The name in released files, which transformers renames and vLLM does not.
        table=partial(_dense, sinks="softmax_offset"),
        config=_flint,
        read=_read_flint,
        refused=_flint_refused,
        qk_norm=True,
        windows="all",
    )
)
register(
    Target(
        name="granitemoe_swa",
        architecture="GraniteMoeSWAForCausalLM",
        since="5.15",
        attention=SINKS,
        table=_granite_moe,
        config=_granite_moe_config,
        read=_read_granite_moe,
        refused=_granite_refused,
        moe=True,
        windows="mixed",
        shared_expert=True,
    )
)
register(
    Target(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        since="4.55",
        attention=SINKS,
        table=_gpt_oss,
        config=_gpt_oss_config,
        read=_read_gpt_oss,
        refused=_gpt_oss_refused,
        moe=True,
        activations=("gpt-oss",),
        windows="mixed",
        rope_scaling=False,
    )
)
