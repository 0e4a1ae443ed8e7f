"""Turn a model with plain attention into one with gates or sinks.

A gate with zero weights passes half of every head, sigmoid(0); doubling the output projection
compensates. Both are exact in floating point: the logits do not change by a bit, and the gates can
learn, because their gradient does not vanish at 1/2.

Sinks have no such start: a sink that changes nothing (logit minus infinity) gets no gradient. Their
logits are set from a mean sink weight instead, see sink_calibration.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasink.attention.variants import SINK_WEIGHT, ZERO_GATES, variant
from megasink.convert.architecture import Architecture
from megasink.convert.transforms import GroupedQKV
from megasink.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

LINEAR_QKV = "self_attention.linear_qkv."
LINEAR_PROJ = "self_attention.linear_proj.weight"
EXPERT_BIAS = "mlp.router.expert_bias"
LINEAR_GATE = "self_attention.linear_gate."
SOFTMAX_OFFSET = "self_attention.core_attention.softmax_offset"
# For ordinary scores, a sink with this logit has a weight below 1e-12.
NO_SINK = -30.0


def is_float32(key: str) -> bool:
    """Return whether a weight is float32 in a model of any dtype."""
    return key.endswith(EXPERT_BIAS)


@dataclass(frozen=True)
class Change:
    """The attention of a changed vanilla model; `sink_weight` is None for gates."""

    attention: str
    sink_weight: float | None = None


def change_of(name: str | None, granularity: str | None, sink_weight: float) -> Change | None:
    """Return the change that the options of an import specify."""
    if name is None:
        return None
    record = variant(name)
    start = record.export and record.export.start
    if start == ZERO_GATES:
        return Change(record.kind({"gate_granularity": granularity} if granularity else {}))
    if start != SINK_WEIGHT:
        raise UserError(
            f"--attention-variant {name} cannot replace plain attention: its record has no "
            "Export.start"
        )
    if granularity is not None:
        raise UserError(f"--gate-granularity has no effect with --attention-variant {name}")
    if not 0 < sink_weight < 1:
        raise UserError(
            f"--sink-weight {sink_weight}: use a value below 1, and above 0 so that the "
            "sink gets a gradient"
        )
    return Change(record.kinds[0], sink_weight)


def gated_model(model: Architecture, change: Change | None) -> Architecture:
    """Return the architecture after a change."""
    if change is None:
        return model
    if not model.variant.is_plain:
        raise UserError(
            f"--attention-variant: the model already has {model.attention} attention, but only "
            "plain softmax attention can be changed"
        )
    if change.sink_weight is not None and model.options.attention_bias_type != "none":
        raise UserError(
            f"--attention-variant {change.attention} does not support a model with position biases"
        )
    return dataclasses.replace(model, attention=change.attention)


def changed(key: str, tensor: "Tensor", model: Architecture, change: Change | None) -> "Tensor":
    """Return the form of a vanilla model's weight in the changed model."""
    if change is None or change.sink_weight is not None:
        return tensor
    if key.endswith(LINEAR_PROJ):
        return tensor * 2
    if change.attention == "elementwise" and LINEAR_QKV in key and "layer_norm" not in key:
        sizes = (model.groups, model.queries, model.head_dim)
        query, *key_value = GroupedQKV(*sizes).to_hf(tensor)
        parts = (query, query.new_zeros(query.shape), *key_value)
        return GroupedQKV(*sizes, gate=True).to_megatron(*parts)[0]
    return tensor


def added(model: Architecture, change: Change | None) -> "dict[str, Tensor]":
    """Return the weights that a layer gains, by key without "decoder.layers."."""
    if change is None:
        return {}
    import torch

    dtype = getattr(torch, model.dtype)
    if change.sink_weight is not None:
        return {SOFTMAX_OFFSET: torch.full((model.heads,), NO_SINK)}
    if change.attention != "headwise":
        return {}
    gate = {f"{LINEAR_GATE}weight": torch.zeros(model.heads, model.hidden, dtype=dtype)}
    if model.qkv_bias:
        gate[f"{LINEAR_GATE}bias"] = torch.zeros(model.heads, dtype=dtype)
    return gate
