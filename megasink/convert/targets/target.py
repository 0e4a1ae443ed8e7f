"""Conversion targets: architectures of transformers, the models that fit, and the choice of one."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.megasink_model import MegasinkOptions
from megasink.convert.weight_table import Row
from megasink.errors import UserError, unknown_name
from megasink.plugins import advice

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
    """An architecture of transformers."""

    name: str  # value of ``--target``, and transformers' model_type
    architecture: str  # class name in transformers
    since: str  # first version of transformers that has it
    attention: tuple[str, ...]  # supported kinds of attention; a config.json means the first one
    table: Callable[[Architecture], tuple[Row, ...]]
    # {key of its config.json: field of Architecture}, besides the common ones of hf_config.py.
    keys: Mapping[str, str] = field(default_factory=dict)
    # {key of its config.json: the only value that megasink supports}
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Further entries of its config.json.
    config: Callable[[Architecture], Config] = field(default=lambda model: {})
    # (config.json) -> {field of Architecture: value} that `keys` cannot express.
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = field(default=lambda config: {})
    # {key: the value that transformers takes without it}, where megasink's differs.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Share of a head that is rotated without a config.json's; None if always the whole.
    partial_rotary: float | None = None
    no_rope: bool = False  # whether layers can be without RoPE
    # Further reasons why a model does not fit.
    misfits: Callable[[Architecture], list[str]] = field(default=lambda model: [])
    moe: bool | None = False  # whether it has experts; None if it can have them
    qk_norm: bool | None = False  # whether queries and keys have an RMSNorm; None if they can
    # (options of a model) -> the options that a model of this architecture has.
    options: Callable[[MegasinkOptions], MegasinkOptions] = field(
        default=lambda options: MegasinkOptions()
    )
    activations: tuple[str, ...] = ("silu", "gelu", "relu")  # supported ones of the FFN
    qkv_bias: bool | None = False  # of query, key and value projections; None if they can
    bias: bool = False  # whether all linear layers can have biases
    # Sliding windows: "none"; "mixed", per layer and of one size, as in layer_types and
    # sliding_window; "all" if the same for all layers; "alternating", as "mixed", and exported with
    # a window in layers 0, 2, 4, ... or in none.
    windows: str = "none"
    rope_scaling: tuple[str, ...] = ("llama3", "yarn")  # supported types
    rope_by_layer: bool = False  # whether its config.json has RoPE parameters per layer type
    shared_expert: bool = False  # whether it supports a shared expert without a gate
    delta_net: bool = False  # whether layers can have gated delta-net
    shared_gate: bool = False  # whether its shared expert has a gate
    renormalizes: bool = True  # whether probabilities of the chosen experts always sum to one
    latent: bool = False  # whether it has latent attention
    first_dense: bool = False  # whether first layers can lack experts, and experts be in groups
    custom_code: bool = False  # whether it is exported with megasink's modeling files
    # What else in a config.json megasink does not support.
    refused: Callable[[Mapping[str, Any]], list[str]] = field(default=lambda config: [])
    quantized: tuple[str, ...] = ()  # supported quantization methods, which the import unpacks
    # For each of `ENGINES`, what it ignores in this architecture without an error, as names of
    # `_IGNORED`; None if it does not have it. docs/serving.md shows this.
    engines: tuple[str | None, ...] = ()

    def write_config(self, model: Architecture) -> Config:
        """Return the entries of its config.json besides the common keys."""
        keys = {key: getattr(model, name) for key, name in self.keys.items()}
        if self.partial_rotary is not None:
            keys["partial_rotary_factor"] = model.options.rotary_percent
        if self.windows in ("mixed", "alternating"):
            keys["layer_types"] = layer_types(model)
        if self.windows != "none":
            keys["sliding_window"] = window_of(model)
        return {**keys, **self.fixed, **self.config(model)}

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return {field of Architecture: value} of a config.json, besides the common keys."""
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
        elif self.windows == "all":
            implied["windows"] = (config.get("sliding_window"),) * config["num_hidden_layers"]
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


TARGETS: dict[str, Target] = {}
"""Targets by name, in the order of registration."""


def register(target: Target) -> Target:
    """Add a target for models that fit no earlier one; raise UserError for a name that is taken."""
    if target.name in TARGETS:
        raise UserError(f"conversion target {target.name!r} is registered twice: rename one")
    TARGETS[target.name] = target
    return target


def named(name: str) -> Target:
    """Return the target for ``--target``."""
    if name not in TARGETS:
        raise UserError(f"{unknown_name('--target', name, TARGETS)}; {advice()}")
    return TARGETS[name]


def choose(model: Architecture, name: str | None = None) -> tuple[Target, str]:
    """Return a target and the reason: the one of this name, or the first that fits the model."""
    if name is not None:
        target = named(name)
        if problems := target.export_problems(model):
            raise UserError(f"--target {name} does not fit this model: {'; '.join(problems)}")
        return target, "requested"
    reasons: list[str] = []
    for target in sorted(TARGETS.values(), key=lambda target: target.custom_code):
        problems = target.export_problems(model)
        if not problems and not target.custom_code:
            return target, f"the first that supports {described(model)}"
        if not problems:
            nearest = f" ({' | '.join(reasons)})" if reasons else ""
            return target, (
                f"no architecture of transformers supports {described(model)}{nearest}; exporting "
                "with megasink's modeling files, which need trust_remote_code=True"
            )
        near = model.attention in target.attention and target.moe in (None, bool(model.experts))
        if near or target.custom_code:
            reasons.append(f"{target.name}: {'; '.join(problems)}")
    raise UserError(f"no conversion target supports this model ({' | '.join(reasons)})")


def described(model: Architecture) -> str:
    """Summarize the features that determine the target."""
    units = "gated FFN" if model.options.gated_unit else "plain FFN"
    words = [f"{model.attention} attention", f"{model.activation} {units}"]
    words.append("qk-norm" if model.qk_norm else "no qk-norm")
    words.append(f"{model.experts} experts" if model.experts else "no experts")
    if model.variant_layers:
        words[0] += f" in {sum(model.variant_layers)} of {model.layers} layers"
    if model.latent:
        words.append("latent attention")
    if model.delta_net:
        words.append(f"gated delta-net in {sum(model.linear_layers)} of {model.layers} layers")
    if model.bias or model.qkv_bias:
        words.append("biases" if model.bias else "q, k and v biases")
    if any(model.windows):
        words.append("sliding windows")
    return ", ".join([*words, *model.options.flags()])
