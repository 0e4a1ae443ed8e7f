"""The model description of a run, from Megatron's arguments.

Every option of a run is either a field of `Architecture` or refused by name, including options that
will be added later.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from megasink.attention.variants import foreign_options, variant
from megasink.attention.variants.variant_layers import windowed_layers
from megasink.config import MODEL_OPTIONS, visible_tokens
from megasink.convert.architecture import Architecture, DeltaNet, Latent, Yarn
from megasink.convert.megasink_model import NAMES, options_from, unknown_values
from megasink.megatron.hybrid_pattern import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    FFN,
    LATENT,
    count_blocks,
    layers_of,
    pattern_of,
)
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import refused

# Options of megasink that a field of `Architecture` covers, or that do not affect a trained model.
_SAID = {
    "attention_variant",
    "attention_variant_layers",
    "gate_granularity",
    "ffn_activation",
    "softmax_offset_init",
    "attention_kernel",
    "sink_lr_mult",
    "sink_weight_decay",
    "match_ffn_width",
    "zero_init_outputs",
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
# (gated unit, its offset, its clamp) -> the activation of an architecture.
_GATED_UNITS: dict[Any, str] = {(u, 0.0, None): name for u, name in _ACTIVATIONS.items()}
_GATED_UNITS["quick_geglu", 1.0, 7.0] = "gpt-oss"
_PLAIN_ACTIVATIONS = ("relu", "gelu", "silu")


def architecture_of(
    saved: Mapping[str, Any], vocabulary: int | None
) -> tuple[Architecture, list[str]]:
    """Return the architecture of a run, and a list of features that no target supports."""
    problems = _unknown(saved)
    problems += [f"{flag} {value}: {why}" for flag, value, why in refused(saved, "in an export")]
    problems += _other_blocks(saved)
    activation, gated_unit = _activation(saved)
    if activation is None:
        problems.append(
            "no target supports its FFN activation: targets support GPT-OSS's and, without "
            "offset and clamp, --swiglu, --squared-relu and --ffn-activation "
            f"{'|'.join([*_ACTIVATIONS, *_PLAIN_ACTIVATIONS])}"
        )
    yarn = _yarn(saved)
    latent, dense = _latent(saved), _dense_layers(saved)
    if dense is None:
        problems.append(
            f"--moe-layer-freq {saved.get('moe_layer_freq')}: targets only support experts in "
            "every layer after the first dense ones"
        )
    if "sinkhorn" in (routing := str(saved.get("moe_router_load_balancing_type"))):
        problems.append(_without_counterpart(f"--moe-router-load-balancing-type {routing}"))
    rotated = saved if yarn is None else {**saved, "position_embedding_type": "rope"}
    options = options_from(rotated, gated_unit=gated_unit)
    problems += [_without_counterpart(option) for option in unknown_values(options)]
    record = variant(saved["attention_variant"])
    attention = record.kind(saved)
    if record.export is None:
        problems.append(
            f"--attention-variant {record.name}: its record has no export rule "
            "(megasink.attention.variants.Export)"
        )
    elif attention not in record.kinds:
        problems.append(f"--attention-variant {record.name} has no export rule for {attention!r}")
        attention = record.kinds[0]
    experts, groups = saved.get("num_experts") or 0, saved.get("moe_router_num_groups")
    linear = _linear_layers(saved)
    ffn = saved["ffn_hidden_size"]
    bias = bool(saved.get("add_bias_linear"))
    grouped = "num_query_groups" if saved.get("group_query_attention") else "num_attention_heads"
    architecture = Architecture(
        layers=count_blocks(saved),
        hidden=saved["hidden_size"],
        heads=saved["num_attention_heads"],
        groups=saved[grouped],
        head_dim=latent.rotated if latent else saved["kv_channels"],
        ffn=(saved.get("moe_ffn_hidden_size") or ffn) if experts else ffn,
        vocabulary=_tokens(saved, vocabulary),
        padded=saved["padded_vocab_size"],
        tied=not saved["untie_embeddings_and_output_weights"],
        positions=saved["max_position_embeddings"],
        norm_eps=saved["layernorm_epsilon"],
        zero_centred=bool(saved.get("layernorm_zero_centered_gamma")),
        rope_base=float(saved["rotary_base"]),
        rope_factor=saved["rope_scaling_factor"] if saved.get("use_rope_scaling") else None,
        yarn=yarn,
        attention=attention,
        variant_layers=tuple(map(bool, saved.get("attention_variant_layers") or ())),
        delta_net=DeltaNet.of(saved) if linear else None,
        linear_layers=linear,
        qk_norm=bool(saved["qk_layernorm"]),
        qkv_bias=bias or bool(saved.get("add_qkv_bias")),
        bias=bias,
        no_rope=_no_rope(saved),
        windows=_windows(saved),
        activation=activation or "silu",
        experts=experts,
        topk=saved["moe_router_topk"] if experts else 0,
        shared_ffn=(saved.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
        shared_gate=bool(experts and saved.get("moe_shared_expert_gate")),
        dense_layers=dense or 0,
        dense_ffn=ffn if dense else 0,
        expert_groups=(groups, saved["moe_router_group_topk"]) if experts and groups else None,
        latent=latent,
        renormalize=not saved.get("moe_router_pre_softmax") or options.sigmoid_router,
        dtype="bfloat16" if saved.get("bf16") else "float16" if saved.get("fp16") else "float32",
        init_std=saved.get("init_method_std") or 0.02,
        options=options,
    )
    return architecture, problems


def _tokens(saved: Mapping[str, Any], vocabulary: int | None) -> int:
    rows, named = int(saved["padded_vocab_size"]), saved.get("vocab_size") or 0
    if vocabulary is not None:
        # An imported model can have more rows than its tokenizer has tokens.
        return min(rows, max(vocabulary, named))
    return min(rows, named or rows)


def _unknown(saved: Mapping[str, Any]) -> list[str]:
    """Return the problems of options that no field covers."""
    known = _SAID | NAMES | foreign_options(variant(saved["attention_variant"]))
    fields = itertools.chain.from_iterable(map(dataclasses.fields, MODEL_OPTIONS))
    return [
        _without_counterpart(f"{flag_of(field.name)} {saved[field.name]}")
        for field in fields
        if field.name not in known and saved.get(field.name, field.default) != field.default
    ]


def _without_counterpart(option: str) -> str:
    return f"{option} has no counterpart in Hugging Face"


def _other_blocks(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of a hybrid model with other blocks."""
    pattern = layers_of(saved.get("hybrid_layer_pattern") or "")
    mixers, ffns = pattern[::2], {*pattern[1::2]}
    paired = len(mixers) == len(pattern[1::2]) and ffns <= {FFN, EXPERTS}
    alike = len({*mixers}) == 1 and mixers[0] in ATTENTION + LATENT
    if pattern and not (paired and (alike or {*mixers} <= {ATTENTION, DELTA_NET})):
        yield (
            f"--hybrid-layer-pattern {pattern}: targets only support blocks of attention or gated "
            "delta-net, each with an FFN or experts (*-, G-, *E and GE)"
        )


def _linear_layers(saved: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether each block has gated delta-net; empty if none has."""
    pattern = layers_of(saved.get("hybrid_layer_pattern") or "")
    linear = tuple(symbol == DELTA_NET for symbol in pattern[::2])
    return linear if any(linear) else ()


def _activation(saved: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the activation of the FFN, None if unsupported, and whether it is gated."""
    name = saved.get("ffn_activation")
    if name in _PLAIN_ACTIVATIONS:
        return name, False
    if saved.get("squared_relu"):
        return "relu2", False
    # --ffn-activation sets swiglu, too.
    unit = name or next((u for u in ("swiglu", "quick_geglu") if saved.get(u)), None)
    limits = saved.get("glu_linear_offset") or 0.0, saved.get("activation_func_clamp_value")
    return _GATED_UNITS.get((unit, *limits)), True


def _latent(saved: Mapping[str, Any]) -> Latent | None:
    if not saved.get("multi_latent_attention"):
        return None
    widths: dict[str, Any] = {n: saved.get(key) for n, key in Latent.ARGUMENTS.items()}
    return Latent(**widths)


def _dense_layers(saved: Mapping[str, Any]) -> int | None:
    """Return the number of first blocks without experts; None if others have none, too."""
    if not saved.get("num_experts"):
        return 0
    ffns = [symbol for symbol in pattern_of(saved) if symbol in FFN + EXPERTS]
    dense = (*ffns, EXPERTS).index(EXPERTS)
    return None if FFN in ffns[dense:] else dense


def _yarn(saved: Mapping[str, Any]) -> Yarn | None:
    """Return YaRN's numbers, with Megatron's defaults (`_apply_yarn_config_from_args`)."""
    # Of latent attention YaRN is Megatron's default; with a factor of 1 it is none.
    scaled = saved.get("rotary_scaling_factor") not in (None, 1.0)
    latent = saved.get("multi_latent_attention") and saved.get("rope_type") != "rope" and scaled
    if saved.get("position_embedding_type") != "yarn" and not latent:
        return None
    given = {name: saved.get(argument) for name, argument in Yarn.ARGUMENTS.items()}
    defaults: dict[str, Any] = {"factor": 1.0, "original": 4096}
    return Yarn(**defaults | {name: value for name, value in given.items() if value is not None})


def _windows(saved: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window per layer."""
    window = saved.get("window_size")
    visible = visible_tokens(tuple(window) if window else None)
    names = ("num_layers", "window_size", "window_attn_skip_freq")
    options = SimpleNamespace(**{name: saved.get(name) for name in names})
    has_window = _of_blocks(saved, windowed_layers(options))
    return tuple(visible if has else None for has in has_window)


def _no_rope(saved: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether each layer has no RoPE; empty if all have it."""
    every, layers = saved.get("no_rope_freq"), saved["num_layers"]
    if isinstance(every, int):
        every = [layer % every == 0 for layer in range(1, layers + 1)]
    without = _of_blocks(saved, tuple(map(bool, every or ())))
    return without if any(without) else ()


def _of_blocks(saved: Mapping[str, Any], by_layer: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the entries of the blocks, where Megatron counts the layers of a pattern."""
    pattern = saved.get("hybrid_layer_pattern")
    if pattern and by_layer and saved["num_layers"] == len(layers_of(pattern)):
        return by_layer[::2]
    return by_layer
