"""Dense families with plain softmax attention, one record each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.targets import rows
from megasink.convert.targets.softmax_attention import BIASES, bias, family, one_bias
from megasink.convert.targets.target import no_layer_types, register
from megasink.convert.transforms import FusedQKV, PairedRotationQKV
from megasink.convert.weight_table import Row

_LAYER_NORM = MegasinkOptions(normalization="LayerNorm")
_SANDWICH = MegasinkOptions(sandwich_norm=True)
_UNGATED = MegasinkOptions(gated_unit=False)
_UNGATED_LAYER_NORM = MegasinkOptions(gated_unit=False, normalization="LayerNorm")
_CWM_ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0}
_CWM_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NO_BIASES = dict.fromkeys(BIASES, False)
_FUSED = ("gate_up_proj", "down_proj")
_SINGLE = ("up_proj", "down_proj")
_GLM_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("post_self_attn_layernorm", "post_mlp_layernorm"),
)

# Megatron's muP flags carry the multipliers of embeddings, scores and logits.
_MULTIPLIERS = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
_MUP = ("use_mup", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def _ungated(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(model, rows.ffn(model, names=_SINGLE))


def _nemotron(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(model, rows.ffn(model, names=_SINGLE), zero_centred=True)


def _paired(model: Architecture) -> tuple[Row, ...]:
    return rows.decoder(model, rows.ffn(model), _paired_attention(model))


def _paired_attention(model: Architecture) -> tuple[Row, ...]:
    rotated = int(model.head_dim * model.options.rotary_percent)
    sizes = (model.groups, model.queries, model.head_dim)
    return rows.attention(model, mixed=PairedRotationQKV(*sizes, rotated=rotated))


def _glm4(model: Architecture) -> tuple[Row, ...]:
    ffn = rows.ffn(model, names=_FUSED)
    return rows.decoder(model, ffn, _paired_attention(model), norms=_GLM_NORMS)


def _phi3(model: Architecture) -> tuple[Row, ...]:
    attention = rows.attention(model, mixed=FusedQKV(model.groups, model.queries, model.head_dim))
    return rows.decoder(model, rows.ffn(model, names=_FUSED), attention)


def _whole_heads(model: Architecture) -> list[str]:
    """Its heads share the hidden size, whatever head_dim says."""
    if model.head_dim * model.heads == model.hidden:
        return []
    return [f"its head dim is {model.hidden} / {model.heads}, not {model.head_dim}"]


def _read_ministral(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("layer_types"):
        return {}
    return {"windows": (config["sliding_window"],) * config["num_hidden_layers"]}


def _read_smollm3(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, rotated = range(config["num_hidden_layers"]), config.get("no_rope_layers")
    if rotated is None:
        every = config["no_rope_layer_interval"]
        rotated = [(layer + 1) % every for layer in layers]
    without = tuple(not rotated[layer] for layer in layers)
    return {"no_rope": without if any(without) else ()}


def _smollm3_refused(config: Mapping[str, Any]) -> list[str]:
    rotated, layers = config.get("no_rope_layers"), config["num_hidden_layers"]
    if rotated is not None and len(rotated) < layers:
        return [f"no_rope_layers with {len(rotated)} entries for {layers} layers"]
    windows = {kind for kind in config.get("layer_types") or () if "sliding" in kind}
    return [f"layer_types: {name}" for name in windows if config.get("use_sliding_window")]


def _smollm3_config(model: Architecture) -> dict[str, Any]:
    without = model.no_rope or (False,) * model.layers
    return {"no_rope_layers": [int(not each) for each in without]}


def _with_multipliers(given: MegasinkOptions) -> MegasinkOptions:
    return MegasinkOptions(**{name: getattr(given, name) for name in _MUP})


def _hyperclovax(model: Architecture) -> tuple[Row, ...]:
    after = ("post_norm1", "post_norm2") if model.options.sandwich_norm else ()
    return rows.decoder(model, rows.ffn(model), norms=(*_NORMS, *after))


def _granite_config(model: Architecture) -> dict[str, Any]:
    options, width = model.options, model.head_dim
    base = (options.mup_base_head_dim or 1.0) if options.use_mup else width
    return {
        "embedding_multiplier": options.mup_embedding_mult,
        "residual_multiplier": 1.0,
        "attention_multiplier": base**0.5 / width,
        "logits_scaling": 1.0 / options.mup_output_mult,
    }


def _read_granite(config: Mapping[str, Any]) -> dict[str, Any]:
    # A residual stream divided by the residual multiplier r adds outputs as they are, and its
    # RMSNorms give the same with epsilon / r^2: no weight changes.
    residual, logits = config["residual_multiplier"], config["logits_scaling"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    multipliers = {
        "mup_embedding_mult": config["embedding_multiplier"] / residual,
        "mup_output_mult": logits if config["model_type"] == "hyperclovax" else 1.0 / logits,
        "mup_base_head_dim": ((config["attention_multiplier"] or width**-0.5) * width) ** 2,
    }
    options: dict[str, Any] = {name: float(f"{value:.12g}") for name, value in multipliers.items()}
    if list(options.values()) != [1.0, 1.0, width]:
        options["use_mup"] = True
    return {
        "norm_eps": config["rms_norm_eps"] / residual**2,
        "options": MegasinkOptions(
            sandwich_norm=bool(config.get("use_post_norm")),
            **(options if options.get("use_mup") else {}),
        ),
    }


for target in (
    family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        fixed={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        defaults={"head_dim": 128, "num_key_value_heads": 8},
        config=lambda model: {"residual_dropout": 0.0},
        qkv_bias=True,
    ),
    family(
        name="arcee",
        architecture="ArceeForCausalLM",
        table=_ungated,
        keys=BIASES,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        read=bias("attention_bias"),
        refused=one_bias,
        options=lambda given: _UNGATED,
        activations=("relu2", "gelu", "relu", "silu"),
        bias=True,
    ),
    family(
        name="cwm",
        architecture="CwmForCausalLM",
        since="5.0",
        fixed={"mlp_bias": False},
        defaults={
            **{"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192, "rope_theta": 1e6},
            "rope_parameters": _CWM_ROPE,
        },
        refused=no_layer_types,
        windows="mixed",
    ),
    family(
        name="ministral",
        architecture="MinistralForCausalLM",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        read=_read_ministral,
        windows="mixed",
    ),
    family(
        name="helium",
        architecture="HeliumForCausalLM",
        table=_paired,
        fixed=_NO_BIASES,
        defaults={
            "rms_norm_eps": 1e-8,
            "head_dim": 128,
            "num_key_value_heads": 20,
            "rope_theta": 1e5,
        },
        misfits=_whole_heads,
    ),
    family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        table=_paired,
        keys={"use_bias": "bias"},
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        read=bias("use_bias"),
        bias=True,
    ),
    family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        table=_glm4,
        keys={"attention_bias": "qkv_bias"},
        defaults={
            "rms_norm_eps": 0.00000015625,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "attention_bias": True,
        },
        options=lambda given: _SANDWICH,
        partial_rotary=0.5,
        qkv_bias=None,
        rope_scaling=(),
    ),
    family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        table=_phi3,
        fixed={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        # The second entry has no effect without scaling.
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        config=lambda model: {"original_max_position_embeddings": model.positions},
        partial_rotary=1.0,
        windows="all",
        rope_scaling=(),
    ),
    family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        keys={"use_qkv_bias": "qkv_bias", "layer_norm_eps": "norm_eps"},
        fixed={"qk_layernorm": False, "use_parallel_residual": False},
        defaults={"layer_norm_eps": 1e-5, "num_key_value_heads": 32},
        config=lambda model: {"hidden_dropout": 0.0},
        misfits=_whole_heads,
        options=lambda given: _LAYER_NORM,
        partial_rotary=0.25,
        qkv_bias=None,
        rope_scaling=(),
    ),
    family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        table=_nemotron,
        keys={"norm_eps": "norm_eps"},
        fixed=_NO_BIASES,
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "initializer_range": 0.0134},
        options=lambda given: _UNGATED_LAYER_NORM,
        partial_rotary=0.5,
        activations=("relu2",),
        rope_scaling=(),
    ),
    family(
        name="jais2",
        architecture="Jais2ForCausalLM",
        since="5.0",
        table=_ungated,
        keys={**BIASES, "layer_norm_eps": "norm_eps"},
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "attention_bias": True,
            "mlp_bias": True,
        },
        read=bias("attention_bias"),
        refused=one_bias,
        options=lambda given: _UNGATED_LAYER_NORM,
        activations=("relu2",),
        bias=True,
    ),
    family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        fixed=_NO_BIASES,
        defaults={
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        config=_smollm3_config,
        read=_read_smollm3,
        refused=_smollm3_refused,
        no_rope=True,
    ),
    family(
        name="granite",
        architecture="GraniteForCausalLM",
        fixed=_NO_BIASES,
        defaults=_MULTIPLIERS | {"attention_multiplier": 1.0},
        config=_granite_config,
        read=_read_granite,
        misfits=_whole_heads,
        options=_with_multipliers,
    ),
    family(
        name="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        since="5.9",
        table=_hyperclovax,
        fixed=_NO_BIASES | {"residual_multiplier": 1.0},
        defaults=_MULTIPLIERS | {"attention_multiplier": None, "use_post_norm": True},
        config=lambda model: {
            **_granite_config(model),
            "logits_scaling": model.options.mup_output_mult,
            "use_post_norm": model.options.sandwich_norm,
        },
        read=_read_granite,
        options=lambda given: dataclasses.replace(
            _with_multipliers(given), sandwich_norm=given.sandwich_norm
        ),
    ),
):
    register(target)
