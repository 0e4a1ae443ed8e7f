"""What a target is: an architecture of transformers, when it fits a model, and its table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megasink.convert.architecture import Architecture
from megasink.convert.table import Row

Config = dict[str, Any]
EXPERTS = {"num_local_experts": "experts", "num_experts_per_tok": "topk"}
"""Keys of mixtures of experts: see `Target.keys`."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One architecture of transformers.

    Attributes:
        name: of ``--target``, and transformers' model_type.
        architecture: class of transformers.
        since: first version of transformers that has it.
        attention: what its heads can be gated by; the first is what a config.json means.
        table: rows for a model.
        keys: {key of its config.json: field of Architecture} beside the common ones (hf_config.py).
        fixed: {key: the only value that Megatron's model here can express}: any other is refused.
        config: what more its config.json says.
        read: {field of Architecture: value} that follows from its config.json in another way.
        moe: it has experts.
        qk_norm: it has RMSNorm of queries and keys; None for either.
        activations: of its FFN.
        qkv_bias, bias: it can have a bias of the query, key and value projections; of all layers.
        windows: sliding windows: "none"; "mixed", by layer, of one size, as layer_types and
            sliding_window say; "all" layers alike.
        rope_scaling: it can have that of Llama 3.
        rope_by_layer: its config.json has RoPE parameters for each kind of layer.
        shared_expert: it can have one, ungated.
        renormalizes: the probabilities of its chosen experts always add up to one.
        custom_code: its modelling file, megasink's own, lies beside the weights; it has the options
            of `MegasinkOptions`.
        refused: of a config.json, what else Megatron's model here cannot express.
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
    moe: bool = False
    qk_norm: bool | None = False
    activations: tuple[str, ...] = ("silu", "gelu", "relu")
    qkv_bias: bool = False
    bias: bool = False
    windows: str = "none"
    rope_scaling: bool = True
    rope_by_layer: bool = False
    shared_expert: bool = False
    renormalizes: bool = True
    custom_code: bool = False
    refused: Callable[[Mapping[str, Any]], list[str]] = field(default=lambda config: [])

    def write_config(self, model: Architecture) -> Config:
        """What its config.json says of a model beside the common keys."""
        keys = {key: getattr(model, name) for key, name in self.keys.items()}
        if self.windows == "mixed":
            keys |= {"layer_types": layer_types(model), "sliding_window": window_of(model)}
        return {**keys, **self.fixed, **self.config(model)}

    def read_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """{field of Architecture: value} of a config.json, beside the common keys.

        A key that it lacks leaves the field at its default.

        Raises:
            KeyError: a key is missing that has none.
        """
        read = self.read(config)
        said = {name: config.get(key) for key, name in self.keys.items() if name not in read}
        keys = {name: value for name, value in said.items() if value is not None}
        implied: dict[str, Any] = {"attention": self.attention[0], "qkv_bias": self.qkv_bias}
        if self.windows == "mixed":
            implied["windows"] = windows_from(config)
        return {**implied, "qk_norm": bool(self.qk_norm), **keys, **read}

    def refusals(self, config: Mapping[str, Any]) -> list[str]:
        """What of a config.json Megatron's model here cannot express."""
        said = {key: config[key] for key in self.fixed if config.get(key) is not None}
        wrong = {key: value for key, value in said.items() if value != self.fixed[key]}
        return [
            *(f"{key} {value!r} (not {self.fixed[key]!r})" for key, value in wrong.items()),
            *self.refused(config),
        ]

    def problems(self, model: Architecture) -> list[str]:
        """Why a model cannot be exported as this; nothing where it can."""
        found = [] if self.custom_code else [f"it has no {flag}" for flag in model.options.flags()]
        if not self.custom_code and not model.options.gated_unit:
            found.append("its FFN has a gated unit")
        if model.attention not in self.attention:
            found.append(f"it has {' or '.join(self.attention)} attention, not {model.attention}")
        if self.moe != bool(model.experts):
            found.append("it has experts" if self.moe else "it has no experts")
        if self.qk_norm is not None and self.qk_norm != model.qk_norm:
            found.append("it has qk-norm" if self.qk_norm else "it has no qk-norm")
        if model.activation not in self.activations:
            found.append(f"its FFN has {' or '.join(self.activations)}, not {model.activation}")
        if model.bias and not self.bias:
            found.append("its linear layers have no biases")
        elif model.qkv_bias != model.bias and not self.qkv_bias:
            found.append("its query, key and value projections have no biases of their own")
        if self.qkv_bias and not model.qkv_bias:
            found.append("its query, key and value projections have biases")
        found += self._window_problems(model)
        if model.rope_factor is not None and not self.rope_scaling:
            found.append("it has no RoPE scaling of Llama 3")
        if model.shared_ffn and not self.shared_expert:
            found.append("it has no shared expert without a gate")
        if model.experts and self.renormalizes and not model.renormalize:
            found.append("the probabilities of its chosen experts add up to one")
        return found

    def _window_problems(self, model: Architecture) -> list[str]:
        sizes = set(model.windows) - {None}
        if not sizes:
            return []
        if self.windows == "none":
            return ["it has no sliding window"]
        if len(sizes) > 1:
            return ["its sliding windows have one size"]
        if self.windows == "all" and None in model.windows:
            return ["its layers all have the same window"]
        return []


def window_of(model: Architecture) -> int | None:
    """The size of the sliding windows; None where no layer has one."""
    return next((w for w in model.windows if w is not None), None)


def layer_types(model: Architecture) -> list[str]:
    """transformers' names for the attention of each layer."""
    return ["full_attention" if w is None else "sliding_attention" for w in model.windows]


def windows_from(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """By layer, from ``layer_types`` and ``sliding_window``."""
    layers = config["num_hidden_layers"]
    types = config.get("layer_types") or ["full_attention"] * layers
    return tuple(config.get("sliding_window") if "sliding" in kind else None for kind in types)
