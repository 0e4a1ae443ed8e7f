"""Steering the gate of heads that have one: a sink, or an explicit gate on the output.

Shapes: B rows, Q tokens, H query heads, D head dim, X 1 or D.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.head_names import head_problems
from megasink.analysis.interventions.call import attention_of, explicit_gate, slot_gate
from megasink.analysis.interventions.heads import Heads, heads_by_layer, normalized_heads
from megasink.analysis.interventions.record import Intervention
from megasink.errors import UserError


@dataclass(frozen=True)
class SteerGates(Intervention):
    """Scale or clamp G of chosen heads: scale * G, but at least minimum and at most maximum.

    Only gated models have such a gate: G = 1 - the weight of the sink logit (P0.2), or the score
    of an explicit gate on the output of attention (P1.10). A plain model has none to steer, nor
    has one with a sink token.

    A gate that is exactly 0 stays 0 if it belongs to a sink, as the output behind it is lost.

    Attributes:
        heads: (layer, head) pairs, both from 0.
        scale: factor of G, from 0 on.
        minimum, maximum: limits of G, in [0, 1]; None for none.

    Raises:
        ValueError: no change is asked for, or values outside their range.
    """

    kind: ClassVar[str] = "steer-gates"
    source: ClassVar[str] = "P0.2, P1.10; steering is megasink's own"

    heads: Heads
    scale: float = 1.0
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        given = (self.scale, self.minimum, self.maximum)
        if any(isinstance(v, bool) or not isinstance(v, int | float | None) for v in given):
            raise ValueError(f"scale, minimum and maximum are numbers, not {given}")
        if given == (1.0, None, None):
            raise ValueError("nothing to steer: give scale, minimum or maximum")
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"scale {self.scale:g}: a number from 0 on")
        low = 0.0 if self.minimum is None else self.minimum
        high = 1.0 if self.maximum is None else self.maximum
        if not 0 <= low <= high <= 1:
            raise ValueError(f"minimum {low:g} and maximum {high:g}: 0 <= minimum <= maximum <= 1")

    def change(self) -> HeadChange:
        """Return the change."""
        return _Steering(self)


class _Steering(HeadChange):
    """See `SteerGates`."""

    reads_attention = True

    def __init__(self, steering: SteerGates):
        self._steering = steering
        self._layers = heads_by_layer(steering.heads)

    def problems(self, heads: Sequence[int]) -> list[str]:
        return head_problems(self._steering.heads, heads)

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        heads = self._layers.get(outputs.layer)
        if heads is None:
            return None
        call = attention_of(outputs, SteerGates.kind)
        gate_BQHX = explicit_gate(call)
        is_sink = gate_BQHX is None
        if gate_BQHX is None:
            if call.slot_logit_BHT is None or call.slot_has_value:
                raise UserError(
                    f"steer-gates: layer {outputs.layer} has neither a sink logit nor a gate on "
                    "the outputs of its heads, so there is nothing to steer"
                )
            gate_BQHX = slot_gate(call, forward.segments)
        gate_BQHX = gate_BQHX[:, :, heads]
        wanted = gate_BQHX * self._steering.scale
        if self._steering.minimum is not None or self._steering.maximum is not None:
            wanted = wanted.clamp(self._steering.minimum, self._steering.maximum)
        out_BQHD = outputs.out_BQHD.clone()
        closed = gate_BQHX == 0
        factor = torch.where(closed, 0.0, wanted / gate_BQHX.masked_fill(closed, 1.0))
        steered = out_BQHD[:, :, heads] * factor.to(out_BQHD.dtype)
        if not is_sink:
            ungated = call.out_BHTD.transpose(1, 2)[:, :, heads]
            steered = torch.where(closed, ungated * wanted.to(ungated.dtype), steered)
        out_BQHD[:, :, heads] = steered
        return out_BQHD
