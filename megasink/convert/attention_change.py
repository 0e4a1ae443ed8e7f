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

from megasink.convert.architecture import GATES, Architecture, Attention
from megasink.errors import UserError

LINEAR_QKV = "self_attention.linear_qkv."
LINEAR_PROJ = "self_attention.linear_proj.weight"
LINEAR_GATE = "self_attention.linear_gate."
SOFTMAX_OFFSET = "self_attention.core_attention.softmax_offset"
FLOAT32 = (
    SOFTMAX_OFFSET,
    "core_attention.key_bias",
    "core_attention.value_bias",
    "relative_bias.weight",
)
# The weight of a sink with this logit is below 1e-12 wherever scores are usual: as good as none.
NO_SINK = -30.0


@dataclass(frozen=True)
class Change:
    """Into which attention a vanilla model is changed.

    Attributes:
        attention: "headwise", "elementwise" or "sink".
        sink_weight: mean attention weight of each head's sink; None for gates.
    """

    attention: Attention
    sink_weight: float | None = None


def change_of(variant: str | None, granularity: str | None, sink_weight: float) -> Change | None:
    """What the options of an import ask for.

    Raises:
        UserError: they do not fit together.
    """
    if variant is None:
        return None
    if variant == "gated":
        return Change("elementwise" if granularity == "elementwise" else "headwise")
    if granularity is not None:
        raise UserError("--gate-granularity goes with --attention-variant gated")
    if not 0 < sink_weight < 1:
        raise UserError(
            f"--sink-weight {sink_weight}: give a weight between 0 and 1; a sink of weight 0 would "
            "get no gradient"
        )
    return Change("sink", sink_weight)


def gated_model(model: Architecture, change: Change | None) -> Architecture:
    """The architecture after a change.

    Raises:
        UserError: the model is not vanilla.
    """
    if change is None:
        return model
    if model.attention != "vanilla":
        raise UserError(
            f"--attention-variant: the model has {model.attention} attention already; only a "
            "vanilla one can be changed"
        )
    if change.attention == "sink" and model.options.attention_bias_type != "none":
        raise UserError("--attention-variant sink: not for a model with biases of positions")
    return dataclasses.replace(model, attention=change.attention)


def changed(key: str, tensor: Tensor, model: Architecture, change: Change | None) -> Tensor:
    """A weight of a vanilla model in the changed one.

    Args:
        key: of Megatron, with or without what stands before "self_attention".
        tensor: one layer's.
        model: the vanilla one.
    """
    if change is None or change.attention not in GATES:
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
    if change.attention == "sink":
        return {SOFTMAX_OFFSET: torch.full((model.heads,), NO_SINK)}
    if change.attention != "headwise":
        return {}
    found = {f"{LINEAR_GATE}weight": torch.zeros(model.heads, model.hidden, dtype=dtype)}
    if model.qkv_bias:
        found[f"{LINEAR_GATE}bias"] = torch.zeros(model.heads, dtype=dtype)
    return found
