"""The linear layers that LoRA can adapt: Hugging Face's names, and where Megatron has them.

Megatron fuses query, key and value into linear_qkv, and the gate and up projections of a gated unit
into linear_fc1. Each name still has matrices A and B of its own, so that an adapter is peft's: the
same parameters, with the same gradients.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from megasink.lora.options import TARGETS

LAYERS = "decoder.layers."
QKV, PROJ, FC1, FC2 = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
LINEARS: dict[str, tuple[str, ...]] = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    PROJ: ("o_proj",),
    FC1: ("gate_proj", "up_proj"),
    FC2: ("down_proj",),
}
"""{Megatron's module in a layer: the names in it, in the order of its rows}."""
A, B = "lora_A", "lora_B"
GATE = "gate"
"""Name beside the targets of linear_qkv for the change of the gate's rows (--lora-train gates)."""
OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "lora_train")
"""Arguments that define an adapter; --lora-dropout is part of training alone."""

BASE = "lora_base"
"""Key of config.json: {"checkpoint": folder of the base, "fingerprint": of its weights}."""


def is_lora(saved: Mapping[str, Any]) -> bool:
    """Return whether a run's arguments are those of a LoRA run."""
    return bool(saved.get("lora_rank"))


def targets_of(options: Any, *, gated_unit: bool) -> tuple[str, ...]:
    """Return the names of the adapted layers, in the order of `TARGETS`.

    Args:
        options: has the fields of LoraOptions.
        gated_unit: whether the FFN has a gate projection.
    """
    if not options.lora_rank:
        return ()
    given = options.lora_targets
    return tuple(
        name for name in TARGETS if (name in given if given else gated_unit or name != "gate_proj")
    )


def scaling_of(rank: int, alpha: float | None) -> float:
    """Return alpha / r, the factor on B A; 1 without an alpha."""
    return 1.0 if alpha is None else float(alpha) / rank


def key_of(linear: str, target: str, matrix: str) -> str:
    """Return the key in a checkpoint of a matrix of all layers, with a leading axis of layers."""
    return f"{LAYERS}{linear}.lora.{target}.{matrix}"


def key_and_layer(name: str) -> tuple[str, int | None]:
    """Return the key in a checkpoint of a parameter of the whole model, and its layer or None."""
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    if not name.startswith(LAYERS) or not number.isdigit():
        return name, None
    return LAYERS + rest, int(number)


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter or key belongs to an adapter."""
    return ".lora." in name


def is_trained(name: str, train: Iterable[str], sinks: Iterable[str]) -> bool:
    """Return whether a LoRA run trains a parameter.

    Args:
        name: of the parameter, in a model or checkpoint.
        train: --lora-train.
        sinks: names of the variants' parameters in core attention.
    """
    if is_of_adapter(name):
        return True
    if "sinks" in train and name.endswith(tuple(f"core_attention.{sink}" for sink in sinks)):
        return True
    gates = ("self_attention.gate.logit", "self_attention.linear_gate.weight")
    return "gates" in train and name.endswith((*gates, "self_attention.linear_gate.bias"))
