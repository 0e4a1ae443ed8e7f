"""Records of an attention call, shared by the public functions and the kernels.

Shapes: H query heads, S keys, B batch, G key/value groups, T queries, D head dim. Statistics (LSE,
gates, logits and their gradients) are float32, or float64 for float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from torch import Tensor


class Slot(StrEnum):
    """The extra softmax slot next to the real keys."""

    NONE = "none"  # no slot: plain attention
    GIVEN = "given"  # an extra key with a given logit and an optional value
    FIRST_KEY = "first-key"  # key and value 0; the real keys start at 1 (vanilla attention)


@dataclass(frozen=True)
class SoftmaxVariant:
    """A variant of softmax attention accepted by `attention`."""

    slot: Slot  # The slot, whose weight is 1 - gate
    # Whether the logit of a given slot is a per-head parameter; otherwise it is 0.
    takes_sink: bool = False


VARIANTS = {
    "vanilla": SoftmaxVariant(Slot.FIRST_KEY),  # P0.1
    "sink": SoftmaxVariant(Slot.GIVEN, takes_sink=True),  # P0.2
    "off-by-one": SoftmaxVariant(Slot.GIVEN),
}


def softmax_variant(name: str, sink_H: Tensor | None) -> SoftmaxVariant:
    """Return the variant with this name."""
    if name not in VARIANTS:
        raise ValueError(f"unknown attention variant {name!r}: choose {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    if variant.takes_sink != (sink_H is not None):
        raise ValueError(f"pass sink_H if and only if the variant is 'sink', got variant {name!r}")
    return variant


class AttentionCall(NamedTuple):
    """The arguments of an attention call other than query, key and value (see `attention`)."""

    distance_bias_HS: Tensor | None  # in the statistics dtype
    scale: float
    causal: bool = True  # the last query is at the last key
    prefix: int = 0
    window: int | None = None
    slot: str = Slot.NONE  # kernels ignore it
    backend: str = "auto"
    needs_gate_gradient: bool = False  # of the gate or of the LSE
    sink_H: Tensor | None = None  # from the op, for a kernel that adds it (`Backend.takes_sink`)
    # Boundaries 0, .., S of documents that all have queries, for a kernel that `packs`.
    cu_seqlens: Sequence[int] | None = None


class BackwardTensors(NamedTuple):
    """Inputs of the backward of attention over a set of keys."""

    grad_out_BHTD: Tensor
    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    out_BHTD: Tensor  # like the LSE, possibly of a softmax over more keys (see `Backend`)
    lse_BHT: Tensor
    lse_grad_BHT: Tensor | None = None  # None for 0
    # Where a kernel with `writes_gradients` writes those of query, key and value in one call.
    into: tuple[Tensor, Tensor, Tensor] | None = None


class Gradients(NamedTuple):
    """Gradients of the inputs, with the same shapes."""

    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    distance_bias_HS: Tensor | None = None
    sink_H: Tensor | None = None


class Slotted(NamedTuple):
    """The input tensors, with any strides."""

    query_BHTD: Tensor
    key_BGSD: Tensor
    value_BGSD: Tensor
    # s: [H], or broadcastable to [B, H, T]; statistics dtype; None unless `Slot.GIVEN`.
    slot_logit: Tensor | None = None
    slot_value: Tensor | None = None  # u, broadcastable to [B, H, T, D]; None for 0


class Results(NamedTuple):
    """The results of the op."""

    out_BHTD: Tensor  # Dense, in the memory order of the query
    lse_BHT: Tensor  # lse'
    # gate_BHT, weight_BHT: G and p; empty for `Slot.NONE`.
    gate_BHT: Tensor
    weight_BHT: Tensor


class Arriving(NamedTuple):
    """Incoming gradients of the results; None if absent."""

    grad_out_BHTD: Tensor | None
    grad_lse_BHT: Tensor | None
    grad_gate_BHT: Tensor | None


def from_op(arguments: Sequence[Any], *records: Any) -> list[Any]:
    """Rebuild the records from the arguments of such an op; in every call, so without iterators."""
    made, start = [], 0
    for record in records:
        stop = start + len(record._fields)
        made.append(record._make(arguments[start:stop]))
        start = stop
    return made


class AttentionOutput(NamedTuple):
    """The result of an attention call.

    Attributes:
        out_BHTD: Attention output, in the dtype of the query.
        lse_BHT: Natural logarithm of the softmax denominator: the log-sum-exp of all visible
            scores, **including the sink logit** if the variant has one (docs/maths.md: LSE').
        gate_BHT: G, the share of the denominator that is not the sink (papers P0.6, P0.7); None
            if not requested.

    The last two are float32, or float64 if the query is.
    """

    out_BHTD: Tensor
    lse_BHT: Tensor
    gate_BHT: Tensor | None
