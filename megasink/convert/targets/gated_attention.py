"""Targets with an explicit gate on the SDPA output: LFM3, Qwen3.5 text, Qwen3-Next."""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.table import Row, row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.softmax_attention import (
    QWEN_EVERY_LAYER,
    QWEN_EXPERTS,
    read_qwen_experts,
)
from megasink.convert.targets.target import Config, Target

# Qwen stores elementwise gates; a headwise gate is stored repeated.
_GATES = ("elementwise", "headwise")
# Qwen3-Next always has a shared expert; one of this width with zero weights adds nothing.
_NO_SHARED_EXPERT = 16


def _qwen(model: Architecture, ffn: tuple[Row, ...] = ()) -> tuple[Row, ...]:
    attention = rows.attention(model, zero_centred=True)
    if model.attention == "headwise":
        attention = rows.with_repeated_gate(model, attention)
    return rows.decoder(model, ffn or rows.ffn(model), attention, zero_centred=True)


def _qwen3_next(model: Architecture) -> tuple[Row, ...]:
    zeros = {
        "shared_expert.gate_proj.weight": (_NO_SHARED_EXPERT, model.hidden),
        "shared_expert.up_proj.weight": (_NO_SHARED_EXPERT, model.hidden),
        "shared_expert.down_proj.weight": (model.hidden, _NO_SHARED_EXPERT),
        "shared_expert_gate.weight": (1, model.hidden),
    }
    return _qwen(model, (*rows.experts(), *rows.zeros(model, f"{rows.LAYER}mlp.", zeros)))


def _lfm3(model: Architecture) -> tuple[Row, ...]:
    gate = row(f"{rows.ATTENTION}linear_gate.weight", f"{rows.LAYER}self_attn.g_proj.weight")
    return rows.decoder(
        model,
        rows.ffn(model, "feed_forward.", ("w1", "w3", "w2")),
        (*rows.attention(model), gate),
        norms=("operator_norm", "ffn_norm"),
        last_norm="embedding_norm",
    )


def _rope(model: Architecture) -> Config:
    return {"rope_type": "default", "rope_theta": model.rope_base}


def _qwen_config(model: Architecture) -> Config:
    return {
        "layer_types": ["full_attention"] * model.layers,
        # llama.cpp's converter reads this key, and assumes 4 without it.
        "full_attention_interval": 1,
        "partial_rotary_factor": 1.0,
        "rope_parameters": _rope(model) | {"partial_rotary_factor": 1.0},
    }


def _qwen_refused(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if set(config.get("layer_types") or ["linear_attention"]) != {"full_attention"}:
        problems.append("layer_types: linear attention")
    rope = config.get("rope_parameters") or {}
    # transformers 4 reads one of the two, and 5 the other; the default is 0.25.
    if {part.get("partial_rotary_factor") for part in (config, rope)} - {None} != {1.0}:
        problems.append("partial_rotary_factor other than 1")
    return problems


def _lfm3_config(model: Architecture) -> Config:
    return {
        "use_sandwich_norm": False,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _rope(model)),
    }


def _lfm3_refused(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if "conv" in (config.get("layer_types") or ["conv"]):
        problems.append("layer_types: convolutions")
    if config.get("use_sandwich_norm", True):
        problems.append("use_sandwich_norm")
    parameters = config.get("rope_parameters") or {}
    ropes = [parameters.get(kind) for kind in set(config.get("layer_types") or [])]
    if any(r != ropes[0] or not r or r.get("rope_type") != "default" for r in ropes):
        problems.append("rope_parameters: layers with different or scaled RoPE")
    return problems


for target in (
    Target(
        name="lfm3",
        architecture="Lfm3ForCausalLM",
        since="5.23",
        attention=("headwise",),
        table=_lfm3,
        keys={"norm_eps": "norm_eps"},
        fixed={"use_attention_gate": True, "attention_bias": False},
        config=_lfm3_config,
        read=lambda config: {
            "rope_base": float(config["rope_parameters"]["full_attention"]["rope_theta"])
        },
        refused=_lfm3_refused,
        qk_norm=True,
        activations=("silu",),
        windows="mixed",
        rope_scaling=(),
        rope_by_layer=True,
    ),
    Target(
        name="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        since="5.13",
        attention=_GATES,
        table=_qwen,
        fixed={"attention_bias": False},
        config=_qwen_config,
        refused=_qwen_refused,
        qk_norm=True,
        rope_scaling=(),
        engines=("", "", "activation"),
    ),
    Target(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        since="5.15",
        attention=_GATES,
        table=_qwen3_next,
        keys=QWEN_EXPERTS,
        fixed={"attention_bias": False, **QWEN_EVERY_LAYER},
        config=lambda model: {
            **_qwen_config(model),
            "shared_expert_intermediate_size": _NO_SHARED_EXPERT,
        },
        read=read_qwen_experts,
        refused=_qwen_refused,
        moe=True,
        qk_norm=True,
        renormalizes=False,
        rope_scaling=(),
        engines=("", "", "activation"),
    ),
):
    register(target)
