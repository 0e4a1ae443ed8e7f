"""Targets with plain softmax attention: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.table import Row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.target import (
    EXPERTS,
    Config,
    Target,
    layer_types,
    window_of,
    windows_from,
)

# Config keys of Qwen's mixtures of experts.
QWEN_EXPERTS = {
    "moe_intermediate_size": "ffn",
    "num_experts": "experts",
    "num_experts_per_tok": "topk",
    "norm_topk_prob": "renormalize",
}
QWEN_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _dense(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(model, rows.ffn(model))


def _mixtral(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(model, rows.experts("block_sparse_moe.", ("w1", "w3", "w2")))


def _llama_refused(config: Mapping[str, Any]) -> list[str]:
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        return ["attention_bias without mlp_bias, or vice versa"]
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
    layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return {"windows": (None,) * layers}
    if config.get("layer_types"):
        return {"windows": windows_from(config)}
    first, window = config.get("max_window_layers", 28), config["sliding_window"]
    return {"windows": tuple(window if layer >= first else None for layer in range(layers))}


def read_qwen_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what released files omit or name differently."""
    return {
        "experts": config.get("num_experts") or config["num_local_experts"],
        "renormalize": bool(config.get("norm_topk_prob", False)),
    }


register(
    Target(
        name="llama",
        architecture="LlamaForCausalLM",
        since="4.28",
        attention=("vanilla",),
        table=_dense,
        keys={"attention_bias": "bias", "mlp_bias": "bias"},
        read=lambda config: {"qkv_bias": bool(config.get("attention_bias"))},
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
        read=_read_windowed,
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
        fixed={"attention_bias": False},
        config=_windowed,
        read=_read_windowed,
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
        keys=EXPERTS,
        config=lambda model: {"sliding_window": window_of(model), "router_jitter_noise": 0.0},
        read=lambda config: {
            "windows": (config.get("sliding_window"),) * config["num_hidden_layers"]
        },
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
        table=lambda model: rows.decoder(model, rows.experts()),
        keys=QWEN_EXPERTS,
        fixed={"attention_bias": False, "use_sliding_window": False, **QWEN_EVERY_LAYER},
        read=read_qwen_experts,
        moe=True,
        qk_norm=True,
        renormalizes=False,
    )
)
