"""A vanilla model as the start of a gated or a sink one.

A gate with zero weights lets half of every head through, sigmoid(0); an output projection twice as
large makes up for it. Both are exact in floating point: the logits stay to the bit, and the gates
still learn, because their gradient does not vanish at 1/2.

A sink has no such start: one that changes nothing (a logit of minus infinity) gets no gradient. Its
logits are set by a mean sink weight instead: see megasink/convert/sinks.py.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from megasink.convert.architecture import Architecture
from megasink.errors import UserError
from megasink.variants import SINK_WEIGHT, ZERO_GATES, parameter_names, variant

LINEAR_QKV = "self_attention.linear_qkv."
LINEAR_PROJ = "self_attention.linear_proj.weight"
LINEAR_GATE = "self_attention.linear_gate."
SOFTMAX_OFFSET = "self_attention.core_attention.softmax_offset"
# The weight of a sink with this logit is below 1e-12 wherever scores are usual: as good as none.
NO_SINK = -30.0


def is_float32(key: str) -> bool:
    """Whether a weight is float32 in a model of any data type."""
    names = (*(f"core_attention.{name}" for name in parameter_names()), "relative_bias.weight")
    return key.endswith(names)


@dataclass(frozen=True)
class Change:
    """Into which attention a vanilla model is changed.

    Attributes:
        attention: as `Architecture.attention`.
        sink_weight: mean attention weight of each head's sink; None for gates.
    """

    attention: str
    sink_weight: float | None = None


def change_of(name: str | None, granularity: str | None, sink_weight: float) -> Change | None:
    """What the options of an import ask for.

    Raises:
        UserError: they do not fit together.
    """
    if name is None:
        return None
    record = variant(name)
    start = record.export and record.export.start
    if start == ZERO_GATES:
        return Change(record.kind({"gate_granularity": granularity} if granularity else {}))
    if start != SINK_WEIGHT:
        raise UserError(
            f"--attention-variant {name}: its record says no way to start from plain attention"
        )
    if granularity is not None:
        raise UserError(f"--gate-granularity does not go with --attention-variant {name}")
    if not 0 < sink_weight < 1:
        raise UserError(
            f"--sink-weight {sink_weight}: give a weight between 0 and 1; a sink of weight 0 would "
            "get no gradient"
        )
    return Change(record.kinds[0], sink_weight)


def gated_model(model: Architecture, change: Change | None) -> Architecture:
    """The architecture after a change.

    Raises:
        UserError: the model is not vanilla.
    """
    if change is None:
        return model
    if not model.variant.is_plain:
        raise UserError(
            f"--attention-variant: the model has {model.attention} attention already; only plain "
            "softmax attention can be changed"
        )
    if change.sink_weight is not None and model.options.attention_bias_type != "none":
        raise UserError(
            f"--attention-variant {change.attention}: not for a model with biases of positions"
        )
    return dataclasses.replace(model, attention=change.attention)


def changed(key: str, tensor: Tensor, model: Architecture, change: Change | None) -> Tensor:
    """A weight of a vanilla model in the changed one.

    Args:
        key: of Megatron, with or without what stands before "self_attention".
        tensor: one layer's.
        model: the vanilla one.
    """
    if change is None or change.sink_weight is not None:
        return tensor
    if key.endswith(LINEAR_PROJ):
        return tensor * 2
    if change.attention == "elementwise" and LINEAR_QKV in key and "layer_norm" not in key:
        # By group [q ... | k | v] -> [q ... | gate ... | k | v].
        sizes = (model.groups, model.queries + 2, model.head_dim)
        by_group = tensor.reshape(*sizes, *tensor.shape[1:])
        query, rest = by_group.split([model.queries, 2], dim=1)
        return torch.cat([query, torch.zeros_like(query), rest], dim=1).flatten(0, 2)
    return tensor


def added(model: Architecture, change: Change | None) -> dict[str, Tensor]:
    """What a layer of the changed model has more, by key without what stands before it."""
    if change is None:
        return {}
    dtype = getattr(torch, model.dtype)
    if change.sink_weight is not None:
        return {SOFTMAX_OFFSET: torch.full((model.heads,), NO_SINK)}
    if change.attention != "headwise":
        return {}
    found = {f"{LINEAR_GATE}weight": torch.zeros(model.heads, model.hidden, dtype=dtype)}
    if model.qkv_bias:
        found[f"{LINEAR_GATE}bias"] = torch.zeros(model.heads, dtype=dtype)
    return found
