"""megasink's own modelling file, for models that no architecture of transformers is."""

from collections.abc import Mapping
from typing import Any

from megasink.convert.architecture import BIASES, GATES, Architecture
from megasink.convert.megasink_model import AUTO_MAP, options_from, unknown_values
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC, Row, row
from megasink.convert.targets import rows
from megasink.convert.targets.registry import register
from megasink.convert.targets.target import Config, Target, layer_types, window_of, windows_from
from megasink.convert.transforms import GateUp, GroupedQKV

_AT = f"{rows.LAYER}self_attn."
_CORE = f"{rows.ATTENTION}core_attention."
_SHARED = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")


class OwnTarget(Target):
    """The target with (nearly) everything that a run can switch on."""

    def problems(self, model: Architecture) -> list[str]:
        """See `Target`."""
        found = [f"it has no {option}" for option in unknown_values(model.options)]
        if len(set(model.windows) - {None}) > 1:
            found.append("its sliding windows have one size")
        if model.rope_factor is not None and model.options.rotary_percent != 1.0:
            found.append("its RoPE scaling is of whole heads")
        if model.experts and model.bias:
            found.append("its experts have no biases")
        if model.experts and not model.options.gated_unit:
            found.append("its experts have gated units")
        if model.experts and model.options.normalization != "RMSNorm":
            found.append("its experts come after an RMSNorm")
        return found


def _table(model: Architecture) -> tuple[Row, ...]:
    return (
        *rows.embedding(model),
        *_positions(model),
        *_layer_norms(model),
        *_attention(model),
        *_gate(model),
        *_ffn(model),
        *_last_norm(model),
        *rows.output_layer(model),
    )


def _positions(model: Architecture) -> tuple[Row, ...]:
    if not model.options.learned_positions:
        return ()
    name = "model.embed_positions.weight"
    return (row("embedding.position_embeddings.weight", name),)


def _norm(model: Architecture, megatron: str, hf: str) -> tuple[Row, ...]:
    """A norm, whose key in Megatron ends in "weight"."""
    found = [row(megatron, f"{hf}.weight")]
    if model.options.normalization == "LayerNorm":
        found.append(row(f"{megatron.removesuffix('weight')}bias", f"{hf}.bias"))
    return tuple(found)


def _layer_norms(model: Architecture) -> tuple[Row, ...]:
    found: list[tuple[str, str]] = []
    if not model.options.post_norm:
        before_ffn = NORM_BEFORE_EXPERTS if model.experts else NORM_OF_LOCAL_SPEC
        found.append((f"{rows.QKV}layer_norm_weight", f"{rows.LAYER}input_layernorm"))
        found.append((before_ffn, f"{rows.LAYER}post_attention_layernorm"))
    if model.options.post_norm or model.options.sandwich_norm:
        attention, ffn = f"{LAYERS}post_self_attn_layernorm", f"{LAYERS}post_mlp_layernorm"
        found.append((f"{attention}.weight", f"{rows.LAYER}attention_output_norm"))
        found.append((f"{ffn}.weight", f"{rows.LAYER}mlp_output_norm"))
    if model.qk_norm:
        found += [(f"{rows.ATTENTION}{x}_layernorm.weight", f"{_AT}{x}_norm") for x in "qk"]
    return tuple(r for megatron, hf in found for r in _norm(model, megatron, hf))


def _last_norm(model: Architecture) -> tuple[Row, ...]:
    if model.options.post_norm:
        return ()
    return _norm(model, "decoder.final_layernorm.weight", "model.norm")


def _attention(model: Architecture) -> tuple[Row, ...]:
    sizes = (model.groups, model.queries, model.head_dim)
    names = [f"{_AT}{x}_proj" for x in "qkv"]
    transform = GroupedQKV(*sizes, gate=model.megatrons_gate)
    if model.megatrons_gate:
        names.insert(1, f"{_AT}gate.proj")
    kinds = ("weight", "bias") if model.qkv_bias else ("weight",)
    found = [
        row(f"{rows.QKV}{kind}", *(f"{name}.{kind}" for name in names), transform=transform)
        for kind in kinds
    ]
    for kind in ("weight", "bias") if model.bias else ("weight",):
        found.append(row(f"{rows.ATTENTION}linear_proj.{kind}", f"{_AT}o_proj.{kind}"))
    if model.has_sink:
        found += rows.sinks(model)
    if model.options.attention_bias_type == "t5":
        found.append(row(f"{_CORE}relative_bias.weight", f"{_AT}position_bias.weight"))
    if model.attention in ("k-bias", "kv-bias"):
        found.append(row(f"{_CORE}key_bias", f"{_AT}key_bias"))
    if model.attention in ("kv-bias", "v-bias"):
        found.append(row(f"{_CORE}value_bias", f"{_AT}value_bias"))
    return tuple(found)


def _gate(model: Architecture) -> tuple[Row, ...]:
    found: list[Row] = []
    if model.options.sdpa_output_norm == "rmsnorm":
        found.append(row(f"{rows.ATTENTION}output_norm.weight", f"{_AT}output_norm"))
    if model.attention not in GATES or model.megatrons_gate:
        return tuple(found)
    if model.options.gate_input == "none":
        return (*found, row(f"{rows.ATTENTION}gate.logit", f"{_AT}gate.logit"))
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        found.append(row(f"{rows.ATTENTION}linear_gate.{kind}", f"{_AT}gate.proj.{kind}"))
    return tuple(found)


def _ffn(model: Architecture) -> tuple[Row, ...]:
    at = f"{rows.LAYER}mlp."
    if not model.experts:
        if model.options.gated_unit:
            return rows.ffn(model)
        kinds = ("weight", "bias") if model.bias else ("weight",)
        both = (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
        return tuple(
            row(f"{rows.MLP}{megatron}.{kind}", f"{at}{hf}.{kind}")
            for megatron, hf in both
            for kind in kinds
        )
    shared: tuple[Row, ...] = ()
    if model.shared_ffn:
        gate, up, down = (f"{at}{name}.weight" for name in _SHARED)
        fc1 = f"{rows.MLP}shared_experts.linear_fc1.weight"
        shared = (
            row(fc1, gate, up, transform=GateUp()),
            row(f"{rows.MLP}shared_experts.linear_fc2.weight", down),
        )
    return (
        row(f"{rows.MLP}router.weight", f"{at}gate.weight"),
        row(f"{rows.EXPERTS}linear_fc1.weight", f"{at}experts.gate_up_proj"),
        row(f"{rows.EXPERTS}linear_fc2.weight", f"{at}experts.down_proj"),
        *shared,
    )


def _config(model: Architecture) -> Config:
    gated = model.attention in GATES
    said = model.options.said()
    found: Config = {
        "auto_map": AUTO_MAP,
        "attention_variant": "gated" if gated else model.attention,
        **({"gate_granularity": model.attention} if gated else {}),
        "qk_norm": model.qk_norm,
        "qkv_bias": model.qkv_bias,
        "linear_bias": model.bias,
        "zero_centred_norms": model.zero_centred,
        "layer_types": layer_types(model),
        "sliding_window": window_of(model),
        **said,
    }
    if model.experts:
        found |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.topk,
            "norm_topk_prob": model.renormalize,
            "shared_expert_intermediate_size": model.shared_ffn,
        }
    return found


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    variant = config.get("attention_variant", "vanilla")
    gated = variant == "gated"
    return {
        "attention": config.get("gate_granularity", "headwise") if gated else variant,
        "qk_norm": bool(config.get("qk_norm")),
        "qkv_bias": bool(config.get("qkv_bias")),
        "bias": bool(config.get("linear_bias")),
        "zero_centred": bool(config.get("zero_centred_norms")),
        "windows": windows_from(config),
        "experts": config.get("num_experts") or 0,
        "topk": config.get("num_experts_per_tok") or 0,
        "shared_ffn": config.get("shared_expert_intermediate_size") or 0,
        "renormalize": bool(config.get("norm_topk_prob", True)),
        "options": options_from(config, gated_unit=bool(config.get("gated_unit", True))),
    }


def _refused(config: Mapping[str, Any]) -> list[str]:
    variant = config.get("attention_variant", "vanilla")
    granularity = config.get("gate_granularity", "headwise")
    found = unknown_values(options_from(config))
    if variant not in ("vanilla", "sink", "off-by-one", "gated", *BIASES):
        found.append(f"attention_variant {variant!r}")
    if granularity not in GATES:
        found.append(f"gate_granularity {granularity!r}")
    if config.get("hidden_act", "silu") not in ("silu", "gelu", "relu", "gpt-oss"):
        found.append(f"hidden_act {config['hidden_act']!r}")
    share, rope = config.get("rotary_percent", 1.0), config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", share))
    if factor != share:
        found.append(f"partial_rotary_factor {factor} and rotary_percent {share}: two shares")
    return found


register(
    OwnTarget(
        name="megasink",
        architecture="MegasinkForCausalLM",
        since="5.23",
        attention=("vanilla", "sink", "off-by-one", *GATES, *BIASES),
        table=_table,
        config=_config,
        read=_read,
        refused=_refused,
        custom_code=True,
    )
)
