"""The model description between Megatron's arguments and a config.json."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

from megasink.attention.variants import Variant, of_kind
from megasink.attention.variants.gate_options import is_megatrons_output_gate
from megasink.attention.variants.variant_layers import PLAIN
from megasink.config import GateGranularity
from megasink.convert.megasink_model import MegasinkOptions

GATES = get_args(GateGranularity)


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The sizes of gated delta-net, with the names and defaults of Megatron and transformers."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "DeltaNet":
        """Read the sizes from a run's arguments or a config.json."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: given[name] for name in names if given.get(name) is not None})

    @property
    def keys(self) -> int:
        """Width of all keys, or of all queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        """Width of all values."""
        return self.linear_num_value_heads * self.linear_value_head_dim


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

    ARGUMENTS: ClassVar = {
        "factor": "rotary_scaling_factor",
        "original": "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "round_range": "yarn_correction_range_round_to_int",
    }
    """{field: Megatron's argument}"""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The widths of latent attention; `queries` is None without a latent of the queries."""

    queries: int | None
    keys: int
    plain: int
    rotated: int
    values: int

    KEYS: ClassVar = {
        "q_lora_rank": "queries",
        "kv_lora_rank": "keys",
        "qk_nope_head_dim": "plain",
        "qk_rope_head_dim": "rotated",
        "v_head_dim": "values",
    }
    """{key of a config.json: field}"""
    ARGUMENTS: ClassVar = {name: key for key, name in KEYS.items()} | {
        "plain": "qk_head_dim",
        "rotated": "qk_pos_emb_head_dim",
    }
    """{field: Megatron's argument}"""

    def as_config(self) -> dict[str, int | None]:
        """Return the entries of a config.json."""
        return {key: getattr(self, name) for key, name in self.KEYS.items()}

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of Architecture that a config.json with latent attention has."""
        widths: dict[str, Any] = {name: config.get(key) for key, name in cls.KEYS.items()}
        for key, name in cls.KEYS.items():
            if widths[name] is None and name != "queries":
                raise KeyError(key)
        latent = cls(**widths)
        return {
            "latent": latent,
            "head_dim": latent.rotated,
            "groups": config["num_attention_heads"],
        }


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with RoPE, pre-RMSNorm and a gated FFN, unless `options` differs."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int  # width of the FFN, or of one expert
    vocabulary: int  # number of tokens
    padded: int  # number of rows in Megatron's embedding
    tied: bool  # whether the output layer shares the embedding's weight
    positions: int
    norm_eps: float
    zero_centred: bool = False  # whether Megatron stores norm weights minus one
    rope_base: float = 10000.0
    rope_factor: float | None = None  # of Llama 3's scaling; None without it
    yarn: Yarn | None = None
    attention: str = "vanilla"  # one of the kinds of a variant (`Variant.kinds`)
    # Per layer, whether it has that attention or plain softmax attention; empty if all have it.
    variant_layers: tuple[bool, ...] = ()
    delta_net: DeltaNet | None = None  # sizes of layers with gated delta-net
    # Per layer, whether it has gated delta-net in place of attention; empty if all are like the
    # first.
    linear_layers: tuple[bool, ...] = ()
    qk_norm: bool = False
    qkv_bias: bool = False  # of linear_qkv
    bias: bool = False  # of every linear layer, linear_qkv too
    no_rope: tuple[bool, ...] = ()  # per layer, whether it has no RoPE; empty if all have it
    # Per layer, the number of tokens that a token sees, including itself; None for all.
    windows: tuple[int | None, ...] = ()
    # Of the FFN: silu, gelu, relu, relu2 (squared), or "gpt-oss" for its clamped gated unit.
    activation: str = "silu"
    experts: int = 0
    topk: int = 0
    shared_ffn: int = 0  # width of the shared expert
    shared_gate: bool = False  # whether the shared expert has a sigmoid gate
    dense_layers: int = 0  # number of first layers without experts
    dense_ffn: int = 0  # width of their FFN
    # Number of groups of experts, and of those that a token may choose from.
    expert_groups: tuple[int, int] | None = None
    latent: Latent | None = None
    renormalize: bool = True  # whether probabilities of the chosen experts are scaled to sum to one
    dtype: str = "float32"
    init_std: float = 0.02
    # Those that only megasink's own modeling files support.
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
        return bool(self.variant_layers or self.linear_layers or self.dense_layers)

    def of_layer(self, layer: int) -> "Architecture":
        """Return the architecture of a model with all layers like this one."""
        if not self.layers_differ:
            return self
        model = self
        if layer < self.dense_layers:
            model = dataclasses.replace(self, ffn=self.dense_ffn, experts=0, shared_ffn=0)
        if self.variant_layers and not self.variant_layers[layer]:
            model = dataclasses.replace(model, attention=PLAIN)
        if self.linear_layers and not self.linear_layers[layer]:
            model = dataclasses.replace(model, delta_net=None)
        return dataclasses.replace(model, variant_layers=(), linear_layers=(), dense_layers=0)

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
        """Return the options for `attention/variants/gate_options.py` and `Parameter.shape`."""
        return SimpleNamespace(
            **dataclasses.asdict(self.options),
            attention_variant=self.variant.name,
            gate_granularity=self.attention,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
            multi_latent_attention=self.latent is not None,
            v_head_dim=self.latent and self.latent.values,
        )
