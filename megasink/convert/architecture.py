"""The model description between Megatron's arguments and a config.json.

Every option of a run is either one of its fields or refused by name, including options that will be
added later.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

from megasink.attention.variants import Variant, foreign_options, of_kind, variant
from megasink.attention.variants.gates import is_megatrons_output_gate
from megasink.attention.variants.layers import PLAIN, windowed_layers
from megasink.config import MODEL_OPTIONS, GateGranularity, visible_tokens
from megasink.convert.delta_net import DeltaNet
from megasink.convert.megasink_model import NAMES, MegasinkOptions, options_from, unknown_values
from megasink.megatron.hybrid_pattern import DELTA_NET, count_blocks, layers_of
from megasink.options.flags import flag_of
from megasink.options.megatron_flags import refused

GATES = get_args(GateGranularity)

# Options of megasink that a field below covers, or that do not affect a trained model.
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
_PLAIN_ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """The numbers of YaRN, as Megatron's flags have them; `original` is the length before it."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_range: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with RoPE, pre-RMSNorm and a gated FFN, unless `options` differs.

    Attributes:
        ffn: width of the FFN, or of one expert.
        vocabulary, padded: number of tokens; number of rows in Megatron's embedding.
        tied: whether the output layer shares the embedding's weight.
        zero_centred: whether Megatron stores norm weights minus one.
        rope_factor: factor of Llama 3's scaling; None without it.
        yarn: YaRN's scaling; None without it.
        attention: one of the kinds of a variant (`megasink.attention.variants.Variant.kinds`).
        variant_layers: per layer, whether it has that attention or plain softmax attention; empty
            if all have it.
        delta_net: sizes of the layers with gated delta-net; None without such layers.
        linear_layers: per layer, whether it has gated delta-net in place of attention; empty if all
            are like the first.
        qkv_bias, bias: whether linear_qkv, or every linear layer (linear_qkv too), has a bias.
        no_rope: per layer, whether it has no RoPE; empty if all have it.
        windows: per layer, the number of tokens that a token sees, including itself; None for all.
        activation: of the FFN: silu, gelu, relu, relu2 (squared), or "gpt-oss" for its clamped
            gated unit.
        experts, topk: 0 for a dense model.
        shared_ffn: width of the shared expert; 0 for none.
        shared_gate: whether the shared expert has a sigmoid gate.
        renormalize: whether the probabilities of the chosen experts are rescaled to sum to one.
        options: those that only megasink's own modeling files support.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocabulary: int
    padded: int
    tied: bool
    positions: int
    norm_eps: float
    zero_centred: bool = False
    rope_base: float = 10000.0
    rope_factor: float | None = None
    yarn: Yarn | None = None
    attention: str = "vanilla"
    variant_layers: tuple[bool, ...] = ()
    delta_net: DeltaNet | None = None
    linear_layers: tuple[bool, ...] = ()
    qk_norm: bool = False
    qkv_bias: bool = False
    bias: bool = False
    no_rope: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    experts: int = 0
    topk: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    renormalize: bool = True
    dtype: str = "float32"
    init_std: float = 0.02
    options: MegasinkOptions = dataclasses.field(default_factory=MegasinkOptions)

    @property
    def queries(self) -> int:
        """Number of query heads per group."""
        return self.heads // self.groups

    @property
    def variant(self) -> Variant:
        """The record of the attention variant."""
        return of_kind(self.attention)

    @property
    def rope_scaling(self) -> str | None:
        """The type of RoPE scaling, by its name in transformers."""
        return "yarn" if self.yarn else None if self.rope_factor is None else "llama3"

    @property
    def layers_differ(self) -> bool:
        """Whether the layers have different weights."""
        return bool(self.variant_layers or self.linear_layers)

    def of_layer(self, layer: int) -> "Architecture":
        """Return the architecture of a model with all layers like this one."""
        if not self.layers_differ:
            return self
        has_variant = not self.variant_layers or self.variant_layers[layer]
        is_linear = self.linear_layers and self.linear_layers[layer]
        return dataclasses.replace(
            self,
            attention=self.attention if has_variant else PLAIN,
            variant_layers=(),
            delta_net=self.delta_net if is_linear else None,
            linear_layers=(),
        )

    @property
    def has_sink(self) -> bool:
        """Whether the softmax denominator has a sink, which targets store as a tensor."""
        export = self.variant.export
        return export is not None and export.sink_tensor

    @property
    def megatrons_gate(self) -> bool:
        """Whether the gate rows are in linear_qkv, like those of Megatron's output gate."""
        return is_megatrons_output_gate(self.gate_options())

    def gate_options(self) -> SimpleNamespace:
        """Return the options for `megasink.attention.variants.gates` and `Parameter.shape`."""
        return SimpleNamespace(
            **dataclasses.asdict(self.options),
            attention_variant=self.variant.name,
            gate_granularity=self.attention,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
        )


def architecture_of(
    saved: Mapping[str, Any], vocabulary: int | None
) -> tuple[Architecture, list[str]]:
    """Return the architecture of a run, and a list of features that no target supports."""
    problems = [*_unknown(saved), *_unfixed(saved), *_other_blocks(saved)]
    activation, gated_unit = _activation(saved)
    if activation is None:
        problems.append(
            "no target has its FFN activation: targets support --swiglu, --squared-relu and "
            f"--ffn-activation {'|'.join([*_ACTIVATIONS, *_PLAIN_ACTIVATIONS])}"
        )
    yarn = _yarn(saved)
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
        problems.append(f"--attention-variant {record.name} has no kind {attention!r}")
        attention = record.kinds[0]
    experts = saved.get("num_experts") or 0
    linear = _linear_layers(saved)
    ffn = saved["ffn_hidden_size"]
    bias = bool(saved.get("add_bias_linear"))
    grouped = "num_query_groups" if saved.get("group_query_attention") else "num_attention_heads"
    architecture = Architecture(
        layers=count_blocks(saved),
        hidden=saved["hidden_size"],
        heads=saved["num_attention_heads"],
        groups=saved[grouped],
        head_dim=saved["kv_channels"],
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
    # Megatron's NullTokenizer adds an end-of-document token.
    return min(rows, named + 1) if named else rows


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


def _unfixed(saved: Mapping[str, Any]) -> list[str]:
    return [f"{flag} {value}: {why}" for flag, value, why in refused(saved, "in an export")]


def _other_blocks(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of a hybrid model with other blocks."""
    pattern = layers_of(saved.get("hybrid_layer_pattern") or "")
    if not re.fullmatch(r"([*G]-)*|([*G]E)*", pattern):
        yield (
            f"--hybrid-layer-pattern {pattern}: targets only support blocks of attention or gated "
            "delta-net, each with an FFN (*- and G-) or each with experts (*E and GE)"
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
    if name is not None:
        return _ACTIVATIONS.get(name), True
    if saved.get("squared_relu"):
        return "relu2", False
    if saved.get("swiglu"):
        return "silu", True
    if saved.get("quick_geglu") and saved.get("glu_linear_offset") == 1.0:
        return ("gpt-oss" if saved.get("activation_func_clamp_value") == 7.0 else None), True
    return None, True


def _yarn(saved: Mapping[str, Any]) -> Yarn | None:
    """Return YaRN's numbers, with Megatron's defaults (`_apply_yarn_config_from_args`)."""
    if saved.get("position_embedding_type") != "yarn":
        return None
    names = {
        "factor": ("rotary_scaling_factor", 1.0),
        "original": ("yarn_original_max_position_embeddings", 4096),
        "round_range": ("yarn_correction_range_round_to_int", True),
        **{name: (f"yarn_{name}", getattr(Yarn, name)) for name in ("beta_fast", "beta_slow")},
        **{name: (name, getattr(Yarn, name)) for name in ("mscale", "mscale_all_dim")},
    }
    given = {name: (saved.get(key), default) for name, (key, default) in names.items()}
    return Yarn(**{name: default if v is None else v for name, (v, default) in given.items()})


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
