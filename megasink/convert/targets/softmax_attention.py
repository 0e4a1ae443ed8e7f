"""Targets with plain softmax attention: Llama, Mistral, Qwen, Mixtral, Qwen3-MoE, nanochat."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.targets import rows
from megasink.convert.targets.target import (
    EXPERTS,
    Config,
    Target,
    layer_types,
    register,
    window_of,
    windowed,
    windows_from,
)
from megasink.convert.transforms import ReversedRotationQKV
from megasink.convert.weight_table import Row, row

# Config keys of Qwen's mixtures of experts.
QWEN_EXPERTS = {
    "moe_intermediate_size": "ffn",
    "num_experts": "experts",
    "num_experts_per_tok": "topk",
    "norm_topk_prob": "renormalize",
}
NANOCHAT = MegasinkOptions(
    norm_without_gain=True, embedding_norm=True, qk_l2_norm=True, gated_unit=False
)
QWEN_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _nanochat(model: Architecture) -> tuple[Row, ...]:
    at = f"{rows.LAYER}self_attn."
    qkv = ReversedRotationQKV(model.groups, model.queries, model.head_dim)
    return (
        *rows.embedding(model),
        row(f"{rows.QKV}weight", *(f"{at}{x}_proj.weight" for x in "qkv"), transform=qkv),
        row(f"{rows.ATTENTION}linear_proj.weight", f"{at}o_proj.weight"),
        row(f"{rows.MLP}linear_fc1.weight", f"{rows.LAYER}mlp.fc1.weight"),
        row(f"{rows.MLP}linear_fc2.weight", f"{rows.LAYER}mlp.fc2.weight"),
        *rows.output_layer(model),
    )


def _read_nanochat(config: Mapping[str, Any]) -> dict[str, Any]:
    cap = config.get("final_logit_softcapping", 15.0)
    return {
        "options": dataclasses.replace(NANOCHAT, logit_softcap=cap),
        "activation": config.get("hidden_act", "relu2"),
    }


def one_bias(config: Mapping[str, Any]) -> list[str]:
    """Refuse an FFN without the biases of attention, or vice versa."""
    if bool(config.get("attention_bias")) != bool(config.get("mlp_bias")):
        return ["attention_bias without mlp_bias, or vice versa"]
    return []


def bias(key: str) -> Any:
    """Return a reader of biases in all projections of attention."""
    return lambda config: {"qkv_bias": bool(config.get(key))}


def _windowed(model: Architecture) -> Config:
    window = window_of(model)
    return {
        "layer_types": layer_types(model),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        # vLLM refuses a mixture by this key, and ignores layer_types.
        "max_window_layers": (windowed(model) or [model.layers])[0],
    }


def read_windowed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read windows of all layers from the first that has one, or of layer_types."""
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


BIASES = {"attention_bias": "bias", "mlp_bias": "bias"}
family = partial(Target, since="4.57", attention=("vanilla",), table=rows.dense)

for target in (
    family(
        name="llama",
        architecture="LlamaForCausalLM",
        keys=BIASES,
        read=bias("attention_bias"),
        refused=one_bias,
        bias=True,
        engines=("", "biases", "activation"),
    ),
    family(
        name="mistral",
        architecture="MistralForCausalLM",
        defaults={"sliding_window": 4096},
        windows="all",
        engines=("", "windows", "activation windows"),
    ),
    family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        config=_windowed,
        read=read_windowed,
        qkv_bias=True,
        windows="mixed",
        engines=("head_dim", "windows", "activation scaling windows"),
    ),
    family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        since="4.55",
        fixed={"attention_bias": False},
        config=_windowed,
        read=read_windowed,
        qk_norm=True,
        windows="mixed",
        engines=("", "windows", "activation scaling windows"),
    ),
    family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        table=lambda model: rows.decoder(
            model, rows.experts("block_sparse_moe.", ("w1", "w3", "w2"))
        ),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        keys=EXPERTS,
        config=lambda model: {"router_jitter_noise": 0.0},
        moe=True,
        windows="all",
        engines=("activation", "activation head_dim scaling windows", "activation windows"),
    ),
    family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        table=lambda model: rows.decoder(model, rows.experts()),
        keys=QWEN_EXPERTS,
        fixed={"attention_bias": False, "use_sliding_window": False, **QWEN_EVERY_LAYER},
        read=read_qwen_experts,
        moe=True,
        qk_norm=True,
        renormalizes=False,
        engines=("activation", "activation", "activation scaling"),
    ),
    family(
        name="nanochat",
        architecture="NanoChatForCausalLM",
        since="5.0",
        table=_nanochat,
        fixed={"attention_bias": False},
        config=lambda model: {"final_logit_softcapping": model.options.logit_softcap},
        read=_read_nanochat,
        options=lambda given: dataclasses.replace(NANOCHAT, logit_softcap=given.logit_softcap),
        activations=("relu2",),
    ),
):
    register(target)
