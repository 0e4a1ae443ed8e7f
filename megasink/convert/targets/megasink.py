"""The target of megasink's own modeling files, for models that transformers does not support."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megasink.attention.variants import is_variant, variant, variants
from megasink.attention.variants.gate_options import fits_latent
from megasink.convert.architecture import GATES, Architecture, Latent
from megasink.convert.megasink_model import AUTO_MAP, MegasinkOptions, options_from, unknown_values
from megasink.convert.megatron_weights import weight_shapes
from megasink.convert.rope import yarn_of_latent
from megasink.convert.targets import rows
from megasink.convert.targets.target import Config, Target, register
from megasink.convert.transforms import GateUp, GroupedQKV, Transform
from megasink.convert.weight_table import LAYERS, Row, row
from megasink.options.megatron_flags import given_of
from megasink.training.checks.exclusive_options import EXCLUDED

# For a layer: {start of Megatron's key: name in the modeling files}; the first match counts.
_NAMES = rows.LATENT | {
    "input_layernorm.": "input_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "post_self_attn_layernorm.": "attention_output_norm.",
    "post_mlp_layernorm.": "mlp_output_norm.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "self_attention.linear_gate.": "self_attn.gate.proj.",
    "self_attention.gate.logit": "self_attn.gate.logit",
    "self_attention.output_norm.weight": "self_attn.output_norm",
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "self_attention.core_attention.relative_bias.": "self_attn.position_bias.",
    "mlp.linear_fc1.": "mlp.up_proj.",
    "mlp.linear_fc2.": "mlp.down_proj.",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.experts.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.experts.linear_fc2.weight": "mlp.experts.down_proj",
    "mlp.shared_experts.linear_fc2.": "mlp.shared_expert.down_proj.",
}
_DENSE = {"first_k_dense_replace": "dense_layers", "dense_intermediate_size": "dense_ffn"}
CAP = "final_logit_softcapping"
_CORE = "self_attention.core_attention."
# Gated FFNs, whose two halves are one tensor in Megatron.
_UNITS = {"mlp.linear_fc1": "mlp", "mlp.shared_experts.linear_fc1": "mlp.shared_expert"}


class MegasinkTarget(Target):
    """The target that supports nearly every option of a run."""

    def problems(self, model: Architecture) -> list[str]:
        options, export = model.options, model.variant.export
        wrong = {
            f"it has no {model.attention} attention": export is None or not export.modelling_file,
            "its sliding windows all have the same size": len(set(model.windows) - {None}) > 1,
            "its RoPE scaling applies to whole heads": (
                model.rope_scaling is not None and options.rotary_percent != 1.0
            ),
            "it has no gated delta-net": model.delta_net,
            "its shared expert has no gate": model.shared_gate,
            "its experts have no biases": model.experts and model.bias,
            "its experts are gated": model.experts and not options.gated_unit,
            "its experts follow an RMSNorm": model.experts and options.normalization != "RMSNorm",
            "its qk-norm has gains": (
                model.qk_norm and (options.qk_l2_norm or options.norm_without_gain)
            ),
            "its relu2 has no gate": model.activation == "relu2" and options.gated_unit,
        }
        unknown = [f"it has no {option}" for option in unknown_values(options)]
        unknown += list(_wrong_latent(model)) if model.latent else []
        return unknown + [text for text, is_so in wrong.items() if is_so]


def _wrong_latent(model: Architecture) -> Iterator[str]:
    """Yield what latent attention has not in Megatron: a config.json may say anything."""
    given = dataclasses.asdict(model.options) | {
        "window_size": next(filter(None, model.windows), None),
        "no_rope_freq": any(model.no_rope) or None,
        "attention_variant_layers": model.variant_layers or None,
        "add_qkv_bias": model.qkv_bias and not model.bias,
    }
    for flag, value, _ in given_of(given, EXCLUDED["multi_latent_attention"]):
        yield f"its latent attention has no {flag} {value}"
    if not fits_latent(model.variant, model.gate_options()):
        yield f"its latent attention has no {model.attention} attention"
    if model.options.position_embedding_type != "rope" or model.options.rotary_percent != 1.0:
        yield "its latent attention rotates all of --qk-pos-emb-head-dim"
    yield from yarn_of_latent(model.yarn)


def _table(model: Architecture) -> tuple[Row, ...]:
    """Return rows for all weights of Megatron's model, in its order."""
    keys = list(weight_shapes(model))
    layers = rows.of_layers(model, _layer_rows)
    positions = "embedding.position_embeddings.weight"
    last_norms = [key for key in keys if key.startswith("decoder.final_layernorm.")]
    return (
        *rows.embedding(model),
        *([row(positions, "model.embed_positions.weight")] if positions in keys else []),
        *layers,
        *(row(key, f"model.norm.{key.rpartition('.')[2]}") for key in last_norms),
        *rows.output_layer(model),
    )


def _layer_rows(model: Architecture) -> list[Row]:
    """Return the rows of the layers of a model with equal layers."""
    of_keys = [_layer_row(model, key) for key in weight_shapes(model) if key.startswith(LAYERS)]
    fixed_sinks = model.has_sink and not model.variant.parameters
    return [*of_keys, *(rows.sinks(model) if fixed_sinks else ())]


def _layer_row(model: Architecture, key: str) -> Row:
    name = key.removeprefix(LAYERS)
    module, _, kind = name.rpartition(".")
    names: tuple[str, ...]
    transform: Transform = Transform()
    if module == "self_attention.linear_qkv" and kind in ("weight", "bias"):
        sizes, gate = (model.groups, model.queries, model.head_dim), model.megatrons_gate
        transform = GroupedQKV(*sizes, gate=gate)
        parts = ("q_proj", *(["gate.proj"] if gate else []), "k_proj", "v_proj")
        names = tuple(f"self_attn.{part}.{kind}" for part in parts)
    elif module in _UNITS and kind in ("weight", "bias") and model.options.gated_unit:
        transform = GateUp()
        names = tuple(f"{_UNITS[module]}.{half}_proj.{kind}" for half in ("gate", "up"))
    else:
        tensors = model.variant.export.tensors if model.variant.export else {}
        known = {_CORE + parameter: f"self_attn.{hf}" for parameter, hf in tensors.items()} | _NAMES
        begin, hf = next((begin, hf) for begin, hf in known.items() if name.startswith(begin))
        names = (hf + name.removeprefix(begin),)
    return row(key, *(rows.LAYER + name for name in names), transform=transform)


def _config(model: Architecture) -> Config:
    option = model.variant.export and model.variant.export.kind_option
    changed = model.options.changed()
    # vLLM's transformers backend reads this key; it would drop a cap of another name.
    cap = changed.pop("logit_softcap", None)
    return {
        "auto_map": AUTO_MAP,
        **({CAP: cap} if cap else {}),
        "attention_variant": model.variant.name,
        "attention_variant_layers": list(model.variant_layers) or None,
        **(model.latent.as_config() if model.latent else {}),
        **dict(zip(("n_group", "topk_group"), model.expert_groups or (), strict=False)),
        **{key: value for key, name in _DENSE.items() if (value := getattr(model, name))},
        "no_rope_layers": [int(not without) for without in model.no_rope] or None,
        **({option: model.attention} if option else {}),
        **changed,
    }


def _options(config: Mapping[str, Any]) -> MegasinkOptions:
    given = {**config, "logit_softcap": config.get(CAP)}
    return options_from(given, gated_unit=bool(config.get("gated_unit", True)))


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    groups = config.get("n_group") or 1
    return {
        **(Latent.read(config) if config.get("kv_lora_rank") else {}),
        **{name: config.get(key) or 0 for key, name in _DENSE.items()},
        "expert_groups": (groups, config.get("topk_group") or 1) if groups > 1 else None,
        "attention": variant(config.get("attention_variant", "vanilla")).kind(config),
        "variant_layers": tuple(map(bool, config.get("attention_variant_layers") or ())),
        "no_rope": tuple(not rotated for rotated in config.get("no_rope_layers") or ()),
        "options": _options(config),
    }


def _refused(config: Mapping[str, Any]) -> list[str]:
    name = config.get("attention_variant", "vanilla")
    if not is_variant(name):
        return [f"attention_variant {name!r}"]
    rotated, count = config.get("no_rope_layers"), config["num_hidden_layers"]
    if rotated is not None and len(rotated) != count:
        return [f"no_rope_layers with {len(rotated)} entries for {count} layers"]
    layers = config.get("attention_variant_layers")
    if layers is not None and (len(layers) != count or {*map(bool, layers)} != {True, False}):
        return [f"attention_variant_layers {layers} (not {count} entries, some true, some false)"]
    granularity = config.get("gate_granularity", "headwise")
    problems = unknown_values(_options(config))
    if granularity not in GATES:
        problems.append(f"gate_granularity {granularity!r}")
    if config.get("hidden_act", "silu") not in ("silu", "gelu", "relu", "relu2", "gpt-oss"):
        problems.append(f"hidden_act {config['hidden_act']!r}")
    if config.get("moe_router_score_function") == "sigmoid" and not config.get(
        "norm_topk_prob", True
    ):
        problems.append("norm_topk_prob False with a sigmoid router")
    share, rope = config.get("rotary_percent", 1.0), config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", share))
    if factor != share:
        problems.append(f"partial_rotary_factor {factor} and rotary_percent {share}, which differ")
    return problems


register(
    MegasinkTarget(
        name="megasink",
        architecture="MegasinkForCausalLM",
        since="5.6",
        attention=tuple(
            kind
            for record in variants()
            if record.export is not None and record.export.modelling_file
            for kind in record.kinds
        ),
        table=_table,
        keys={
            "qk_norm": "qk_norm",
            "qkv_bias": "qkv_bias",
            "linear_bias": "bias",
            "zero_centred_norms": "zero_centred",
            "num_experts": "experts",
            "num_experts_per_tok": "topk",
            "norm_topk_prob": "renormalize",
            "shared_expert_intermediate_size": "shared_ffn",
        },
        config=_config,
        read=_read,
        refused=_refused,
        windows="mixed",
        custom_code=True,
        engines=(None, "windows", None),
    )
)
