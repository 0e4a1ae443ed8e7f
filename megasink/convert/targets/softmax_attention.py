"""Architectures with softmax attention: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.table import Row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.target import Config, Target, layer_types, window_of, windows_from


def _dense(model: Architecture) -> tuple[Row, ...]:
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.ffn(model),
        *rows.head(model),
    )


def _mixtral(model: Architecture) -> tuple[Row, ...]:
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.experts("block_sparse_moe.", ("w1", "w3", "w2")),
        *rows.head(model),
    )


def _qwen_moe(model: Architecture) -> tuple[Row, ...]:
    return (
        *rows.embedding(model),
        *rows.norms(model),
        *rows.attention(model),
        *rows.experts(),
        *rows.head(model),
    )


def _llama(model: Architecture) -> Config:
    return {"attention_bias": model.bias, "mlp_bias": model.bias}


def _read_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias"))
    return {"bias": bias, "qkv_bias": bias}


def _llama_refused(config: Mapping[str, Any]) -> list[str]:
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        return ["attention_bias without mlp_bias, or the other way round"]
    return []


def _windowed(model: Architecture) -> Config:
    window = window_of(model)
    return {
        "layer_types": layer_types(model),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.layers,
    }


def _read_windowed(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("use_sliding_window"):
        return {"windows": (None,) * config["num_hidden_layers"]}
    if config.get("layer_types"):
        return {"windows": windows_from(config)}
    first = config.get("max_window_layers", 28)
    layers = range(config["num_hidden_layers"])
    return {"windows": tuple(config["sliding_window"] if n >= first else None for n in layers)}


def _read_qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_windowed(config), "qkv_bias": True}


def _read_qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_read_windowed(config), "qk_norm": True}


def _mixtral_config(model: Architecture) -> Config:
    return {
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "sliding_window": window_of(model),
        "router_jitter_noise": 0.0,
    }


def _read_mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "experts": config["num_local_experts"],
        "topk": config["num_experts_per_tok"],
        "windows": (config.get("sliding_window"),) * config["num_hidden_layers"],
    }


def _qwen3_moe(model: Architecture) -> Config:
    return {
        **qwen_experts(model),
        "use_sliding_window": False,
        "attention_bias": False,
    }


def qwen_experts(model: Architecture) -> Config:
    """The keys of Qwen's mixtures of experts."""
    return {
        "moe_intermediate_size": model.ffn,
        "num_experts": model.experts,
        "num_experts_per_tok": model.topk,
        "norm_topk_prob": model.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_qwen_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `qwen_experts`."""
    return {
        "ffn": config["moe_intermediate_size"],
        "experts": config.get("num_experts") or config["num_local_experts"],
        "topk": config["num_experts_per_tok"],
        "renormalize": bool(config.get("norm_topk_prob", False)),
        "qk_norm": True,
    }


def some_layers_dense(config: Mapping[str, Any]) -> list[str]:
    """Layers without experts between others."""
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return ["mlp_only_layers or decoder_sparse_step: layers without experts between others"]
    return []


def _qwen3_refused(config: Mapping[str, Any]) -> list[str]:
    return ["attention_bias"] if config.get("attention_bias") else []


def _qwen3_moe_refused(config: Mapping[str, Any]) -> list[str]:
    windows = ["use_sliding_window"] if config.get("use_sliding_window") else []
    return [*_qwen3_refused(config), *some_layers_dense(config), *windows]


register(
    Target(
        name="llama",
        architecture="LlamaForCausalLM",
        since="4.28",
        attention=("vanilla",),
        table=_dense,
        config=_llama,
        read=_read_llama,
        refused=_llama_refused,
        bias=True,
    )
)
register(
    Target(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        since="4.37",
        attention=("vanilla",),
        table=_dense,
        config=_windowed,
        read=_read_qwen2,
        qkv_bias=True,
        windows="mixed",
    )
)
register(
    Target(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        since="4.51",
        attention=("vanilla",),
        table=_dense,
        config=lambda model: {**_windowed(model), "attention_bias": False},
        read=_read_qwen3,
        refused=_qwen3_refused,
        qk_norm=True,
        windows="mixed",
    )
)
register(
    Target(
        name="mixtral",
        architecture="MixtralForCausalLM",
        since="4.36",
        attention=("vanilla",),
        table=_mixtral,
        config=_mixtral_config,
        read=_read_mixtral,
        moe=True,
        windows="all",
    )
)
register(
    Target(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        since="4.51",
        attention=("vanilla",),
        table=_qwen_moe,
        config=_qwen3_moe,
        read=read_qwen_experts,
        refused=_qwen3_moe_refused,
        moe=True,
        qk_norm=True,
        renormalizes=False,
    )
)
