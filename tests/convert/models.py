"""Tiny models of every target, as Architecture: importable without megatron."""

import dataclasses

from megasink.convert.architecture import Architecture, Yarn
from megasink.convert.megasink_model import MegasinkOptions
from tests.convert.tiny import (
    HEADS,
    MOE,
    MUP,
    NANOCHAT,
    SHARED,
    UNGATED,
    YARN,
    deepseek,
    having,
    latent,
    model,
    qwen,
)

DEEP_YARN = Yarn(factor=40.0, original=16, mscale=1.0, mscale_all_dim=1.0)
MODELS = {
    "deepseek_v3": (
        "deepseek_v3",
        deepseek(latent(), yarn=DEEP_YARN),
    ),
    "deepseek_v3-kimi": (
        "deepseek_v3",
        deepseek(
            latent(),
            expert_groups=None,
            shared_ffn=80,
            yarn=Yarn(factor=32.0, original=16, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "deepseek_v3-whole-queries": (
        "deepseek_v3",
        deepseek(latent(None), None, dense_layers=0, dense_ffn=0, tied=True),
    ),
    "llama": ("llama", model()),
    "llama-tied-geglu": ("llama", model(tied=True, activation="gelu")),
    "llama-bias": ("llama", model(bias=True, qkv_bias=True)),
    "nanochat": ("nanochat", model(activation="relu2", options=MegasinkOptions(**NANOCHAT))),
    "llama3": ("llama", model(rope_base=500000.0, rope_factor=32.0, positions=16384)),
    "mistral": ("mistral", model(windows=(5, 5), tied=True)),
    "qwen2": ("qwen2", model(qkv_bias=True)),
    "qwen3": ("qwen3", model(qk_norm=True)),
    "qwen3-windows": ("qwen3", model(qk_norm=True, windows=(5, None))),
    "mixtral": ("mixtral", model(**MOE)),
    "mixtral-window": ("mixtral", model(**MOE, windows=(5, 5))),
    "qwen3_moe": ("qwen3_moe", model(**MOE, qk_norm=True)),
    "qwen3_moe-not-renormalized": (
        "qwen3_moe",
        model(**MOE, qk_norm=True, renormalize=False, tied=True),
    ),
    "granite_swa": ("granite_swa", model(attention="sink")),
    "granite_swa-tied-windows": (
        "granite_swa",
        model(attention="sink", tied=True, windows=(None, 5)),
    ),
    "off-by-one": ("granite_swa", model(attention="off-by-one")),
    "flint": ("flint", model(attention="sink", qk_norm=True)),
    "flint-window": ("flint", model(attention="sink", qk_norm=True, windows=(5, 5))),
    "granitemoe_swa": ("granitemoe_swa", model(attention="sink", **MOE)),
    "granitemoe_swa-shared": (
        "granitemoe_swa",
        model(attention="sink", **MOE, shared_ffn=24, windows=(5, None)),
    ),
    "gpt_oss": ("gpt_oss", model(attention="sink", **MOE, activation="gpt-oss")),
    "gpt_oss-biases": (
        "gpt_oss",
        model(
            attention="sink",
            **MOE,
            activation="gpt-oss",
            bias=True,
            qkv_bias=True,
            windows=(5, None),
        ),
    ),
    "lfm3": ("lfm3", model(attention="headwise", qk_norm=True)),
    "lfm3-tied-window": (
        "lfm3",
        model(attention="headwise", qk_norm=True, tied=True, windows=(5, None)),
    ),
    "qwen3_5": ("qwen3_5_text", model(attention="elementwise", qk_norm=True)),
    "qwen3_5-headwise-relu": (
        "qwen3_5_text",
        model(attention="headwise", qk_norm=True, activation="relu", tied=True),
    ),
    "qwen3_next": ("qwen3_next", model(attention="elementwise", qk_norm=True, **MOE)),
    "qwen3_next-headwise": ("qwen3_next", model(attention="headwise", qk_norm=True, **MOE)),
}


def _own(own, **options):
    return ("megasink", model(options=MegasinkOptions(**own), **options))


# {name: (target, model)} of what no architecture of transformers is.
OWN = {
    "own-sink-moe-qk-norm": _own({}, attention="sink", qk_norm=True, **MOE),
    "own-sink-windows-biases": _own(
        {}, attention="sink", qk_norm=True, windows=(5, None), bias=True, qkv_bias=True
    ),
    "own-sink-in-windows": _own(
        {}, attention="sink", variant_layers=(True, False), windows=(5, None), **MOE
    ),
    "own-elementwise-full-layers": _own(
        {}, attention="elementwise", variant_layers=(False, True), windows=(5, None), qk_norm=True
    ),
    "own-off-by-one-llama3": _own(
        {}, attention="off-by-one", qkv_bias=True, rope_factor=32.0, positions=16384
    ),
    "own-headwise": _own({}, attention="headwise", windows=(None, 5), tied=True),
    "own-headwise-moe": _own({}, attention="headwise", shared_ffn=24, **MOE),
    "own-elementwise": _own({}, attention="elementwise", activation="gelu"),
    "own-elementwise-biases": _own({}, attention="elementwise", bias=True, qkv_bias=True),
    "own-elementwise-moe": _own({}, attention="elementwise", renormalize=False, **MOE),
    "own-elementwise-moe-shared": _own(
        {}, attention="elementwise", qk_norm=True, shared_ffn=24, **MOE
    ),
    "own-vanilla-moe-shared": _own({}, shared_ffn=24, activation="relu", **MOE),
    "own-gpt-oss-dense": _own({}, attention="sink", activation="gpt-oss"),
    "own-sigmoid-router": _own(
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
        },
        attention="headwise",
        shared_ffn=24,
        **MOE,
    ),
    "own-sigmoid-router-top-1": _own(
        {"moe_router_score_function": "sigmoid"}, attention="sink", experts=4, topk=1
    ),
    "own-value-silu-add": _own(
        {"gate_position": "value", "gate_operation": "add", "gate_activation": "silu"},
        attention="elementwise",
        qk_norm=True,
    ),
    "own-query-ns": _own(
        {"gate_position": "query", "gate_activation": "ns-sigmoid"},
        attention="headwise",
        qkv_bias=True,
    ),
    "own-key-identity": _own(
        {"gate_position": "key", "gate_activation": "identity"}, attention="elementwise"
    ),
    "own-output": _own(
        {"gate_position": "output"}, attention="elementwise", bias=True, qkv_bias=True
    ),
    "own-shared-rmsnorm": _own(
        {"gate_shared_heads": True, "sdpa_output_norm": "rmsnorm"}, attention="elementwise"
    ),
    "own-no-input-sandwich-silu": _own(
        {"gate_input": "none", "sandwich_norm": True, "sdpa_output_norm": "silu"},
        attention="headwise",
        **MOE,
    ),
    "own-post-norm-head-sum": _own({"post_norm": True, "multi_head_addition": True}),
    "own-k-bias": _own(
        {"bias_fixed_value": "unit", "bias_fixed_value_norm": 5.0}, attention="k-bias"
    ),
    "own-kv-bias-alibi": _own(
        {"position_embedding_type": "none", "attention_bias_type": "alibi"},
        attention="kv-bias",
        windows=(None, 5),
    ),
    "own-t5": _own(
        {
            "position_embedding_type": "none",
            "attention_bias_type": "t5",
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
        },
        attention="sink",
    ),
    "own-bucket": _own(
        {"position_embedding_type": "none", "attention_bias_type": "bucket"}, windows=(5, None)
    ),
    "own-v-bias-shared": _own(
        {"bias_shared_heads": True, "attention_scale_alpha": 0.5}, attention="v-bias"
    ),
    "own-gpt2": _own(
        {
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
            "gated_unit": False,
        },
        activation="gelu",
        qk_norm=True,
        bias=True,
        qkv_bias=True,
    ),
    "own-sinusoids": _own(
        {
            "position_embedding_type": "learned_absolute",
            "sinusoidal_position_embedding": True,
            "gated_unit": False,
        },
        activation="relu",
        attention="sink",
    ),
    "own-nanochat-sink": _own(NANOCHAT, attention="sink", activation="relu2"),
    "own-nanochat-elementwise-moe": _own(
        {"norm_without_gain": True, "embedding_norm": True, "logit_softcap": 9.0},
        attention="elementwise",
        **MOE,
    ),
    "own-l2-norm-squared-relu-biases": _own(
        {
            "qk_l2_norm": True,
            "gated_unit": False,
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
        },
        attention="headwise",
        activation="relu2",
        bias=True,
        qkv_bias=True,
    ),
    "own-partial-rotary-clip": _own(
        {"rotary_percent": 0.5, "residual_clip": 0.75}, attention="off-by-one"
    ),
    "own-latent-sink-experts": (
        "megasink",
        deepseek(latent(attention="sink"), yarn=DEEP_YARN),
    ),
    "own-latent-headwise-biases": _own(
        {"gate_shared_heads": True, "residual_clip": 0.75, "attention_scale_alpha": 0.5},
        attention="headwise",
        bias=True,
        **latent(),
    ),
    "own-latent-elementwise-sandwich": _own(
        {"sandwich_norm": True, "gate_operation": "add", "logit_softcap": 9.0},
        attention="elementwise",
        **latent(None),
    ),
    "own-latent-off-by-one-no-norms": _own({}, attention="off-by-one", **latent(qk_norm=False)),
    "own-latent": _own({"normalization": "LayerNorm"}, **latent(), tied=True),
}


def _for_engines(architecture: Architecture) -> Architecture:
    """Sizes that vLLM's kernels take; what an engine ignores changes the logits."""
    sizes = {"hidden": 96, "head_dim": 32, "ffn": 128, "norm_eps": 0.01, "rope_base": 700.0}
    layers = {"layers": 4, "windows": architecture.windows * 2}
    if architecture.rope_factor is not None:
        sizes |= {"rope_base": 500000.0}
    if architecture.activation == "gpt-oss":
        sizes |= {"norm_eps": 1e-5}
    if architecture.qkv_bias or (architecture.has_sink and architecture.experts):
        sizes |= {"hidden": 128, "head_dim": 2 * architecture.head_dim}
    return dataclasses.replace(architecture, **sizes, **layers)


# With windows where vLLM and llama.cpp may take them from another key, and another activation.
_MORE = {
    "qwen2-windows": ("qwen2", model(qkv_bias=True, windows=(5, None))),
    "qwen2-all-windows": ("qwen2", model(qkv_bias=True, windows=(5, 5))),
    "qwen2-head_dim": ("qwen2", model(qkv_bias=True, head_dim=32)),
    "granitemoe_swa-head_dim": ("granitemoe_swa", model(attention="sink", **MOE, head_dim=32)),
    "mixtral-gelu": ("mixtral", model(**MOE, activation="gelu")),
    "granitemoe_swa-gelu": ("granitemoe_swa", model(attention="sink", **MOE, activation="gelu")),
    "qwen3-gelu": ("qwen3", model(qk_norm=True, activation="gelu")),
    "qwen3_moe-gelu": ("qwen3_moe", model(**MOE, qk_norm=True, activation="gelu")),
    "granite_swa-llama3": (
        "granite_swa",
        model(attention="sink", rope_base=500000.0, rope_factor=32.0, positions=16384),
    ),
}
ENGINES = {f"engines-{name}": (t, _for_engines(m)) for name, (t, m) in (MODELS | _MORE).items()}

# Families that compute what an earlier target does, or that need no more than an option.
FAMILIES = {
    "llama-yarn": ("llama", model(yarn=YARN)),
    "gpt_oss-yarn": (
        "gpt_oss",
        model(
            attention="sink",
            **MOE,
            activation="gpt-oss",
            bias=True,
            qkv_bias=True,
            windows=(5, None),
            yarn=Yarn(factor=32.0, original=16, beta_fast=8.0, beta_slow=2.0, round_range=False),
        ),
    ),
    "own-yarn": ("megasink", model(attention="headwise", yarn=YARN)),
    "qwen3-yarn": ("qwen3", model(qk_norm=True, yarn=Yarn(factor=2.0, original=48, mscale=0.5))),
    "mixtral-yarn": (
        "mixtral",
        model(**MOE, yarn=Yarn(factor=2.0, original=48, mscale=0.7, mscale_all_dim=0.4)),
    ),
    "glm4_moe": ("glm4_moe", deepseek(None, rotated=0.5, qkv_bias=True)),
    "glm4_moe-no-qk-norm": (
        "glm4_moe",
        deepseek(None, None, 0.5, qk_norm=False, expert_groups=None, shared_ffn=80, tied=True),
    ),
    "dots1": ("dots1", deepseek(None, windows=(None, 5))),
    "seed_oss": ("seed_oss", model(qkv_bias=True)),
    "arcee": ("arcee", model(yarn=YARN, **UNGATED, **having(gated_unit=False))),
    "ministral": ("ministral", model(windows=(5, None))),
    "helium": ("helium", model(**HEADS)),
    "ernie4_5": ("ernie4_5", model(bias=True, qkv_bias=True, tied=True)),
    "glm4": ("glm4", model(qkv_bias=True, **having(sandwich_norm=True, rotary_percent=0.5))),
    "phi3": ("phi3", model(windows=(5, 5), **having(rotary_percent=0.75))),
    "stablelm": (
        "stablelm",
        model(qkv_bias=True, **HEADS, **having(normalization="LayerNorm", rotary_percent=0.5)),
    ),
    "nemotron": (
        "nemotron",
        model(**UNGATED, **having(gated_unit=False, normalization="LayerNorm", rotary_percent=0.5)),
    ),
    "jais2": (
        "jais2",
        model(
            bias=True,
            qkv_bias=True,
            **UNGATED,
            **having(gated_unit=False, normalization="LayerNorm"),
        ),
    ),
    "smollm3": ("smollm3", model(no_rope=(False, True))),
    "granite": ("granite", model(**HEADS, **having(**MUP))),
    "granite-plain": ("granite", model(**HEADS)),
    "hyperclovax": (
        "hyperclovax",
        model(**having(sandwich_norm=True, **MUP), norm_eps=3e-4, tied=True),
    ),
    "qwen3_next-dense": ("qwen3_next", qwen(True, False, True)),
    "qwen3_next-first-dense": (
        "qwen3_next",
        qwen(True, True, False, **SHARED, dense_layers=1, dense_ffn=56),
    ),
    "qwen3_next-shared": ("qwen3_next", qwen(True, False, **SHARED, renormalize=False)),
    "qwen3_next-delta-net": ("qwen3_next", qwen(True, False, **MOE, attention="headwise")),
    "qwen3_5-delta-net": ("qwen3_5_text", qwen(True, True, False, tied=True, zero_centred=False)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", qwen(True, False, **SHARED)),
    "own-no-rope-mup": (
        "megasink",
        model(attention="sink", no_rope=(True, False), **having(**MUP)),
    ),
}
MODELS |= FAMILIES
