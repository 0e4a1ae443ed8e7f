"""How attention is called: one record, from the public functions down to the kernels.

Shapes: H query heads, S keys, B batch, G key/value groups, T queries, D head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor


class Slot(StrEnum):
    """What stands beside the real keys in the softmax."""

    NONE = "none"  # nothing: plain attention
    GIVEN = "given"  # one more key, of a logit and maybe a value that are passed in
    FIRST_KEY = "first-key"  # key and value 0; the real keys start at 1 (vanilla attention)


@dataclass(frozen=True)
class SoftmaxVariant:
    """A variant of softmax attention that `attention` knows by name.

    Attributes:
        slot: whose weight is 1 - gate.
        takes_sink: the slot's logit is a parameter per head; otherwise a given slot has logit 0.
    """

    slot: Slot
    takes_sink: bool = False


VARIANTS = {
    "vanilla": SoftmaxVariant(Slot.FIRST_KEY),  # P0.1
    "sink": SoftmaxVariant(Slot.GIVEN, takes_sink=True),  # P0.2
    "off-by-one": SoftmaxVariant(Slot.GIVEN),
}


def softmax_variant(name: str, sink_H: Tensor | None) -> SoftmaxVariant:
    """The variant of that name.

    Raises:
        ValueError: an unknown name, or a `sink_H` that does not go with it.
    """
    if name not in VARIANTS:
        raise ValueError(f"unknown attention variant {name!r}: one of {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    if variant.takes_sink != (sink_H is not None):
        raise ValueError(f"sink_H goes with variant 'sink', and only with it; got {name!r}")
    return variant


class AttentionCall(NamedTuple):
    """Everything that one call of attention is told, but the tensors it attends over.

    Attributes:
        distance_bias_HS: entry [h, i - j] is added to the score z_ij, in the statistics dtype;
            None for 0.
        scale: factor of the scores.
        causal: a token sees no key after its own position; the last query stands at the last key.
        prefix: keys that every query sees; not with a window.
        window: tokens visible to a token, itself included; None for all.
        slot: what stands beside the keys. No concern of a kernel.
        backend: a name, or "auto".
        needs_gate_gradient: a gradient of the gate or of the LSE is going to be asked for.
    """

    distance_bias_HS: Tensor | None
    scale: float
    causal: bool = True
    prefix: int = 0
    window: int | None = None
    slot: str = Slot.NONE
    backend: str = "auto"
    needs_gate_gradient: bool = False


class BackwardTensors(NamedTuple):
    """What the backward of attention over some keys computes with.

    Attributes:
        out_BHTD, lse_BHT: possibly of a softmax over more keys than these (see `Backend`).
        lse_grad_BHT: None for 0.
    """

    grad_out_BHTD: Tensor
    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    out_BHTD: Tensor
    lse_BHT: Tensor
    lse_grad_BHT: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of a call's inputs, in their shapes."""

    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    distance_bias_HS: Tensor | None = None


# How the types of a record's fields are written in the schema of a custom op.
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
}


def op_schema(*records: type[NamedTuple], outputs: int) -> str:
    """The schema of an op that takes the fields of these records, one after the other."""
    fields = [
        f"{_SCHEMA_TYPES[kind]} {name}"
        for record in records
        for name, kind in record.__annotations__.items()
    ]
    return f"({', '.join(fields)}) -> ({', '.join(['Tensor'] * outputs)})"


def from_op(arguments: Sequence[Any], *records: Any) -> list[Any]:
    """The records again, from the arguments of such an op. It runs in every call: no iterators."""
    made, start = [], 0
    for record in records:
        stop = start + len(record._fields)
        made.append(record._make(arguments[start:stop]))
        start = stop
    return made
