"""A conversion target: an architecture of transformers, the models it fits, and its table."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.weight_table import Row

Config = dict[str, Any]
ENGINES = ("vLLM 0.33", "SGLang 0.5.23", "llama.cpp")
"""Versions that were tested, or whose source was read; llama-cpp-python 0.3.36 for llama.cpp."""
# {feature that an engine may ignore without an error: (words for it, whether a model has it)}
_IGNORED: dict[str, tuple[str, Callable[[Architecture], bool]]] = {
    "windows": ("sliding windows", lambda model: any(model.windows)),
    "activation": ("activation", lambda model: model.activation in ("gelu", "relu")),
    "scaling": ("RoPE scaling", lambda model: bool(model.rope_scaling)),
    "biases": ("biases of the FFN", lambda model: model.bias),
    "head_dim": ("head_dim", lambda model: model.head_dim * model.heads > model.hidden),
    "pattern": ("pattern of layers", lambda model: layer_interval(model) is None),
    "epsilon": ("epsilon of the norms", lambda model: model.norm_eps != 1e-5),
}
EXPERTS = {"num_local_experts": "experts", "num_experts_per_tok": "topk"}
"""Keys of mixtures of experts for `Target.keys`."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An architecture of transformers.

    Attributes:
        name: value of ``--target``, and transformers' model_type.
        architecture: class name in transformers.
        since: first version of transformers that has it.
        attention: supported kinds of attention; a config.json means the first one.
        table: (model) -> rows.
        keys: {key of its config.json: field of Architecture}, besides the common ones of
            hf_config.py.
        fixed: {key of its config.json: the only value that megasink supports}.
        config: (model) -> further entries of its config.json.
        defaults: {key: the value that transformers takes if config.json does not have it}, where
            megasink's differs.
        partial_rotary: the share of a head that is rotated if config.json does not have it; None if
            heads are always rotated as a whole.
        no_rope: whether layers can be without RoPE.
        misfits: (model) -> further reasons why it does not fit.
        read: (config.json) -> {field of Architecture: value} that `keys` cannot express.
        moe: whether it has experts; None if it can have them.
        qk_norm: whether queries and keys have an RMSNorm; None if they can have it.
        options: (options of a model) -> the options that a model of this architecture has.
        activations: supported activations of the FFN.
        qkv_bias: whether the query, key and value projections have biases; None if they can.
        bias: whether all linear layers can have biases.
        windows: sliding windows: "none"; "mixed", per layer and of one size, as in layer_types and
            sliding_window; "all" if the same for all layers; "alternating", as "mixed", and
            exported with a window in layers 0, 2, 4, ... or in none.
        rope_scaling: the supported types of RoPE scaling.
        rope_by_layer: whether its config.json has RoPE parameters per layer type.
        shared_expert: whether it supports a shared expert without a gate.
        delta_net: whether layers can have gated delta-net.
        shared_gate: whether its shared expert has a gate.
        renormalizes: whether the probabilities of the chosen experts always sum to one.
        latent: whether it has latent attention.
        first_dense: whether its first layers can lack experts, and experts can be in groups.
        custom_code: whether it is exported with megasink's modeling files, which support
            `MegasinkOptions`.
        refused: (config.json) -> what else in it megasink does not support.
        quantized: supported quantization methods, which the import unpacks.
        engines: for each of `ENGINES`, what it ignores in this architecture without an error, as
            names of `_IGNORED`; None if it does not have it. docs/serving.md shows this.
    """

    name: str
    architecture: str
    since: str
    attention: tuple[str, ...]
    table: Callable[[Architecture], tuple[Row, ...]]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    config: Callable[[Architecture], Config] = field(default=lambda model: {})
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda config: {})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    partial_rotary: float | None = None
    no_rope: bool = False
    misfits: Callable[[Architecture], list[str]] = field(default=lambda model: [])
    moe: bool | None = False
    qk_norm: bool | None = False
    options: Callable[[MegasinkOptions], MegasinkOptions] = field(
        default=lambda options: MegasinkOptions()
    )
    activations: tuple[str, ...] = ("silu", "gelu", "relu")
    qkv_bias: bool | None = False
    bias: bool = False
    windows: str = "none"
    rope_scaling: tuple[str, ...] = ("llama3", "yarn")
    rope_by_layer: bool = False
    shared_expert: bool = False
    delta_net: bool = False
    shared_gate: bool = False
    renormalizes: bool = True
    latent: bool = False
    first_dense: bool = False
    custom_code: bool = False
    refused: Callable[[Mapping[str, Any]], list[str]] = field(default=lambda config: [])
    quantized: tuple[str, ...] = ()
    engines: tuple[str | None, ...] = ()

    def write_config(self, model: Architecture) -> Config:
        """Return the entries of its config.json besides the common keys."""
        keys = {key: getattr(model, name) for key, name in self.keys.items()}
        if self.partial_rotary is not None:
            keys["partial_rotary_factor"] = model.options.rotary_percent
        if self.windows in ("mixed", "alternating"):
            keys |= {"layer_types": layer_types(model), "sliding_window": window_of(model)}
        return {**keys, **self.fixed, **self.config(model)}

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field of Architecture: value} of a config.json, besides the common keys.

        A missing key leaves its field at the default.
        """
        read = self.read(config)
        present = {name: config.get(key) for key, name in self.keys.items() if name not in read}
        keys = {name: value for name, value in present.items() if value is not None}
        implied: dict[str, Any] = {"attention": self.attention[0], "qkv_bias": bool(self.qkv_bias)}
        options = read.get("options") or self.options(MegasinkOptions())
        if self.partial_rotary is not None:
            rope = config.get("rope_parameters") or {}
            share = config.get("partial_rotary_factor", self.partial_rotary)
            share = rope.get("partial_rotary_factor", share)
            options = dataclasses.replace(options, rotary_percent=float(share))
        if self.windows in ("mixed", "alternating"):
            implied["windows"] = windows_from(config)
        implied["qk_norm"] = bool(self.qk_norm)
        return {**implied, **keys, **read, "options": options}

    def refusals(self, config: Mapping[str, Any]) -> list[str]:
        """Return the features of a config.json that megasink does not support."""
        present = {key: config[key] for key in self.fixed if config.get(key) is not None}
        wrong = {key: value for key, value in present.items() if value != self.fixed[key]}
        types, layers = config.get("layer_types") or [], config["num_hidden_layers"]
        known = {"full_attention", "linear_attention" if self.delta_net else "sliding_attention"}
        problems = [f"layer_types: {kind}" for kind in sorted({*types} - known)]
        if types and len(types) != layers:
            problems.append(f"layer_types with {len(types)} entries for {layers} layers")
        has_windows = "sliding_attention" in types and config.get("use_sliding_window", True)
        if has_windows and config.get("sliding_window") is None:
            problems.append("layer_types with sliding_attention, but no sliding_window")
        return [
            *(f"{key} {value!r} (not {self.fixed[key]!r})" for key, value in wrong.items()),
            *problems,
            *self.refused(config),
        ]

    def problems(self, model: Architecture) -> list[str]:
        """Return the reasons why a model cannot be exported as this architecture."""
        wanted = self.options(model.options)
        if self.partial_rotary is not None:
            share = model.options.rotary_percent
            wanted = dataclasses.replace(wanted, rotary_percent=share)
        flags, wanted_flags = model.options.flags(), wanted.flags()
        problems = [f"it has no {flag}" for flag in flags if flag not in wanted_flags]
        problems += [f"it has {flag}" for flag in wanted_flags if flag not in flags]
        if model.options.gated_unit != wanted.gated_unit:
            problems.append(f"its FFN is {'' if wanted.gated_unit else 'not '}gated")
        if model.attention not in self.attention:
            kinds = " or ".join(self.attention)
            problems.append(f"it has {kinds} attention, not {model.attention}")
        if model.variant_layers:
            problems.append("its layers all have the same attention")
        if self.moe not in (None, bool(model.experts)):
            problems.append("it has experts" if self.moe else "it has no experts")
        if self.qk_norm not in (None, model.qk_norm):
            problems.append("it has qk-norm" if self.qk_norm else "it has no qk-norm")
        if model.activation not in self.activations:
            problems.append(f"its FFN has {' or '.join(self.activations)}, not {model.activation}")
        if model.bias and not self.bias:
            problems.append("its linear layers have no biases")
        elif model.qkv_bias != model.bias and self.qkv_bias is False:
            problems.append("it cannot have biases in the query, key and value projections alone")
        if self.qkv_bias and not model.qkv_bias:
            problems.append("its query, key and value projections have biases")
        sizes = set(model.windows) - {None}
        if sizes and self.windows == "none":
            problems.append("it has no sliding window")
        elif len(sizes) > 1:
            problems.append("its sliding windows all have the same size")
        elif sizes and self.windows == "all" and None in model.windows:
            problems.append("its layers all have the same window")
        if model.rope_scaling and model.rope_scaling not in self.rope_scaling:
            problems.append(f"it has no {model.rope_scaling} RoPE scaling")
        if any(model.no_rope) and not self.no_rope:
            problems.append("its layers all have RoPE")
        if model.shared_gate and not self.shared_gate:
            problems.append("its shared expert has no gate")
        elif model.shared_ffn and not (model.shared_gate or self.shared_expert):
            problems.append("it has no ungated shared expert")
        if model.delta_net and not self.delta_net:
            problems.append("it has no gated delta-net")
        if bool(model.latent) != self.latent:
            problems.append(f"it has {'' if self.latent else 'no '}latent attention")
        if (model.expert_groups or model.dense_layers) and not self.first_dense:
            problems.append("it has experts in every layer, without groups")
        if model.experts and self.renormalizes and not model.renormalize:
            problems.append("the probabilities of its chosen experts sum to one")
        return problems + self.misfits(model)

    def export_problems(self, model: Architecture) -> list[str]:
        """Return `problems`, and windows that engines would read as another pattern."""
        even = list(range(0, model.layers, 2))
        wrong = self.windows == "alternating" and windowed(model) not in ([], even)
        return (
            self.problems(model) + ["vLLM and llama.cpp assume windows in layers 0, 2, ..."] * wrong
        )

    def misread(self, model: Architecture) -> list[str]:
        """Return a line for each engine that would serve this model wrongly without an error."""
        lines = []
        for engine, names in zip(ENGINES, self.engines, strict=False):
            ignored = [_IGNORED[name] for name in (names or "").split()]
            if words := [word for word, has in ignored if has(model)]:
                lines.append(
                    f"{engine} ignores this model's {' and '.join(words)}: use another engine"
                )
        return lines


def no_layer_types(config: Mapping[str, Any]) -> list[str]:
    """Return the problem of a config.json without layer_types, which need not mean full ones."""
    return [] if config.get("layer_types") else ["no layer_types"]


def windowed(model: Architecture) -> list[int]:
    """Return the layers that have a sliding window."""
    return [layer for layer, window in enumerate(model.windows) if window is not None]


def window_of(model: Architecture) -> int | None:
    """Return the size of the sliding windows; None if no layer has one."""
    return next((w for w in model.windows if w is not None), None)


def layer_types(model: Architecture) -> list[str]:
    """Return transformers' name for the attention of each layer."""
    if model.linear_layers:
        return [f"{'linear' if linear else 'full'}_attention" for linear in model.linear_layers]
    return ["full_attention" if w is None else "sliding_attention" for w in model.windows]


def layer_interval(model: Architecture) -> int | None:
    """Return n if each n-th layer has attention and the others gated delta-net, else None."""
    has = [not linear for linear in model.linear_layers or (False,) * model.layers]
    every = has.index(True) + 1
    same = all(has[n] == ((n + 1) % every == 0) for n in range(model.layers))
    return every if same else None


def windows_from(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window per layer, from ``layer_types`` and ``sliding_window``."""
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * layers
    window = config.get("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
