"""Steering the gate of heads that have one: a sink, or an explicit gate on the output.

Shapes: B rows, Q tokens, H query heads, D head dim, X 1 or D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.head_names import head_problems
from megasink.analysis.interventions.call import attention_of, explicit_gate, slot_gate
from megasink.analysis.interventions.heads import heads_by_layer
from megasink.analysis.interventions.kinds import SteerGates
from megasink.errors import UserError


class Steering(HeadChange):
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
