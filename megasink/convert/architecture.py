"""What a model is, as far as both sides can say it: between Megatron's arguments and a config.json.

Everything that a run can switch on is either one of these fields or refused by name, options that
will be added later included.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

from megasink.config import MODEL_OPTIONS, GateGranularity, visible_tokens
from megasink.convert.megasink_model import NAMES, MegasinkOptions, options_from, unknown_values
from megasink.gate_options import is_megatrons_output_gate
from megasink.variants import Variant, foreign_options, of_kind, variant

GATES = get_args(GateGranularity)

# Options of megasink that the fields below say, or that leave a trained model as it is.
_SAID = {
    "attention_variant",
    "gate_granularity",
    "ffn_activation",
    "softmax_offset_init",
    "attention_kernel",
    "sink_lr_mult",
    "sink_weight_decay",
    "match_ffn_width",
}
# Megatron's own options with the one value that every target has: what else they take is refused.
_FIXED: dict[str, tuple[Any, ...]] = {
    "rotary_interleaved": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "no_rope_freq": (None,),
    "multi_latent_attention": (False,),
    "mtp_num_layers": (None, 0),
    "squared_relu": (False,),
    "openai_gelu": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_quantile_balancing_ema": (0.0,),
    "attention_output_gate": (False,),
    "qk_l2_norm": (False,),
    "use_mup": (False,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "experimental_attention_variant": (None,),
    "moe_layer_freq": (1, "1", [1]),
    "moe_latent_size": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None,),
    "moe_shared_expert_gate": (False,),
    "moe_apply_probs_on_input": (False,),
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
_PLAIN_ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder; unless `options` says else, with RoPE, RMSNorm before its parts, gated FFN units.

    Attributes:
        layers, hidden, heads, groups, head_dim, ffn: sizes; `ffn` is that of one expert, where
            there are experts.
        vocabulary: tokens; `padded` rows in Megatron's embedding.
        tied: the output layer has the embedding's weight.
        positions: that the model was trained with.
        norm_eps, zero_centred: of the norms; whether Megatron stores their weights minus one.
        rope_base, rope_factor: of RoPE; the factor of Llama 3's scaling, None for none.
        attention: one of the kinds of a variant (`megasink.variants.Variant.kinds`).
        qk_norm: RMSNorm of each query and key head.
        qkv_bias, bias: of linear_qkv; of every linear layer (then also `qkv_bias`).
        windows: by layer, tokens that a token sees, itself included; None for all.
        activation: of the gate of the FFN unit: silu, gelu, relu; "gpt-oss" for its clamped one.
        experts, topk: 0 for a dense model.
        shared_ffn: width of the shared expert; 0 for none.
        renormalize: the chosen experts' probabilities add up to one.
        dtype: of the weights, as torch names it.
        init_std: of the initial weights.
        options: what only megasink's own modelling file has.
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
    attention: str = "vanilla"
    qk_norm: bool = False
    qkv_bias: bool = False
    bias: bool = False
    windows: tuple[int | None, ...] = ()
    activation: str = "silu"
    experts: int = 0
    topk: int = 0
    shared_ffn: int = 0
    renormalize: bool = True
    dtype: str = "float32"
    init_std: float = 0.02
    options: MegasinkOptions = dataclasses.field(default_factory=MegasinkOptions)

    @property
    def queries(self) -> int:
        """Query heads of each group."""
        return self.heads // self.groups

    @property
    def variant(self) -> Variant:
        """The record of its attention."""
        return of_kind(self.attention)

    @property
    def has_sink(self) -> bool:
        """Whether the softmax has a sink in its denominator, which targets hold in a tensor."""
        export = self.variant.export
        return export is not None and export.sink_tensor

    @property
    def megatrons_gate(self) -> bool:
        """Whether the rows of the gate stand in linear_qkv, as those of Megatron's output gate."""
        return is_megatrons_output_gate(self.gate_options())

    def gate_options(self) -> SimpleNamespace:
        """What `megasink.gate_options` and the shapes of a variant's parameters ask for."""
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
    """The architecture of a run, and what it does that no target has.

    Args:
        saved: its arguments, as `megasink.checkpoint.saved_arguments.read_arguments` gives them.
        vocabulary: tokens of its tokenizer; None where it has none: every row of the embedding.
    """
    problems = [*_unknown(saved), *_unfixed(saved)]
    activation, gated_unit = _activation(saved)
    if activation is None:
        problems.append(
            "its FFN has an activation of Megatron's own: targets have --swiglu or "
            f"--ffn-activation {'|'.join([*_ACTIVATIONS, *_PLAIN_ACTIVATIONS])}"
        )
    options = options_from(saved, gated_unit=gated_unit)
    problems += [
        f"{option} has no counterpart in Hugging Face" for option in unknown_values(options)
    ]
    record = variant(saved["attention_variant"])
    attention = record.kind(saved)
    if record.export is None:
        problems.append(
            f"--attention-variant {record.name}: its record has no export rule "
            "(megasink.variants.Export)"
        )
    elif attention not in record.kinds:
        problems.append(f"--attention-variant {record.name} has no {attention}")
        attention = record.kinds[0]
    experts = saved.get("num_experts") or 0
    ffn = saved["ffn_hidden_size"]
    bias = bool(saved.get("add_bias_linear"))
    found = Architecture(
        layers=saved["num_layers"],
        hidden=saved["hidden_size"],
        heads=saved["num_attention_heads"],
        groups=saved["num_query_groups"]
        if saved.get("group_query_attention")
        else saved["num_attention_heads"],
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
        attention=attention,
        qk_norm=bool(saved["qk_layernorm"]),
        qkv_bias=bias or bool(saved.get("add_qkv_bias")),
        bias=bias,
        windows=_windows(saved),
        activation=activation or "silu",
        experts=experts,
        topk=saved["moe_router_topk"] if experts else 0,
        shared_ffn=(saved.get("moe_shared_expert_intermediate_size") or 0) if experts else 0,
        renormalize=not saved.get("moe_router_pre_softmax"),
        dtype="bfloat16" if saved.get("bf16") else "float16" if saved.get("fp16") else "float32",
        init_std=saved.get("init_method_std") or 0.02,
        options=options,
    )
    return found, problems


def _tokens(saved: Mapping[str, Any], vocabulary: int | None) -> int:
    rows, named = int(saved["padded_vocab_size"]), saved.get("vocab_size") or 0
    if vocabulary is not None:
        # An imported model may have more rows than its tokenizer has tokens.
        return min(rows, max(vocabulary, named))
    # Megatron's NullTokenizer has an end-of-document token after those.
    return min(rows, named + 1) if named else rows


def _unknown(saved: Mapping[str, Any]) -> list[str]:
    """Options of megasink that no field says."""
    found = []
    known = _SAID | NAMES | foreign_options(variant(saved["attention_variant"]))
    for options in MODEL_OPTIONS:
        for field in dataclasses.fields(options):
            value = saved.get(field.name, field.default)
            if field.name not in known and value != field.default:
                found.append(f"--{field.name.replace('_', '-')} {value}")
    return [f"{option} has no counterpart in Hugging Face" for option in found]


def _unfixed(saved: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name.replace('_', '-')} {saved[name]}: targets have {fine[0]} alone"
        for name, fine in _FIXED.items()
        if name in saved and saved[name] not in fine
    ]


def _activation(saved: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Activation of the FFN, and whether it has a gated unit."""
    name = saved.get("ffn_activation")
    if name in _PLAIN_ACTIVATIONS:
        return name, False
    if name is not None:
        return _ACTIVATIONS.get(name), True
    if saved.get("swiglu"):
        return "silu", True
    if saved.get("quick_geglu") and saved.get("glu_linear_offset") == 1.0:
        return ("gpt-oss" if saved.get("activation_func_clamp_value") == 7.0 else None), True
    return None, True


def _windows(saved: Mapping[str, Any]) -> tuple[int | None, ...]:
    """By layer; as megatron.core.transformer.utils.is_layer_window_attention counts them."""
    layers, window = saved["num_layers"], saved.get("window_size")
    visible = visible_tokens(tuple(window) if window else None)
    skip = saved.get("window_attn_skip_freq")
    if visible is None:
        return (None,) * layers
    if skip is None:
        return (visible,) * layers
    if isinstance(skip, int):
        return tuple(visible if (layer + 1) % skip else None for layer in range(layers))
    return tuple(visible if flag else None for flag in skip)
