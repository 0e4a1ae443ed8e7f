"""Interventions at work in a running model: zero heads, drain the first value, steer gates.

Shapes: B rows, Q tokens of this call, T tokens of a sample, N samples, H query heads, G key/value
groups, D head dim, X 1 or D.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.head_names import head_problems
from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall, attention_statistics
from megasink.analysis.interventions.heads import Heads, heads_by_layer
from megasink.errors import UserError


class Zeroing(HeadChange):
    """See `ZeroHeads`."""

    def __init__(self, heads: Heads, mask_shape: Sequence[int] | None):
        self._heads, self._shape = heads, mask_shape
        self._layers = heads_by_layer(heads)
        self._masks: dict[int, Tensor] = {}

    def problems(self, heads: Sequence[int]) -> list[str]:
        problems = head_problems(self._heads, heads)
        shape = (len(heads), max(heads, default=0))
        if self._shape not in (None, shape):
            problems.append(
                f"the mask has {self._shape[0]} layers of {self._shape[1]} heads, the model "
                f"{shape[0]} of {shape[1]}"
            )
        return problems

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        heads = self._layers.get(outputs.layer)
        if heads is None:
            return None
        out_BQHD = outputs.out_BQHD
        mask_H1 = self._masks.get(outputs.layer)
        if mask_H1 is None or mask_H1.device != out_BQHD.device:
            mask_H1 = torch.zeros(out_BQHD.shape[2], 1, dtype=torch.bool)
            mask_H1[heads] = True
            mask_H1 = self._masks[outputs.layer] = mask_H1.to(out_BQHD.device)
        return out_BQHD.masked_fill(mask_H1, 0.0)


class Drain(HeadChange):
    """See `DrainFirstValue`."""

    reads_attention = True

    def __init__(self, kind: str, threshold: float | None, phase: str):
        self._kind, self._threshold, self._phase = kind, threshold, phase
        self._masks: dict[int, Tensor] = {}
        self._segments: list[Segment] = []

    def begin(self, forward: ForwardPass) -> None:
        if not forward.cached:
            self._masks, self._segments = {}, list(forward.segments)
            return
        if self._threshold is None or self._phase == "prefill":
            return
        forward.check_continues(self._segments if self._masks else [])

    @torch.no_grad()
    def _first_weights(self, call: AttentionCall, forward: ForwardPass, layer: int) -> list[Tensor]:
        """Return A_i0 [H, T] of each sample's tokens in this call, 0 for heads to leave alone."""
        of = attention_statistics(call, forward.segments, {"first_weight_HT"})
        weights = [statistics["first_weight_HT"] for statistics in of]
        if self._threshold is None:
            return weights
        if not forward.cached:
            awft_NH = torch.stack([first_HT.mean(-1) for first_HT in weights])
            self._masks[layer] = awft_NH > self._threshold
        masked = zip(weights, self._masks[layer], strict=True)
        return [first_HT * mask_H[:, None] for first_HT, mask_H in masked]

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        call = attention_of(outputs, self._kind)
        here = "decode" if forward.cached else "prefill"
        drains = self._phase in (here, "both")
        if not drains and (forward.cached or self._threshold is None):
            return None
        weights = self._first_weights(call, forward, outputs.layer)
        if not drains:
            return None
        heads = call.query_BHTD.shape[1]
        drained_BQHD = torch.zeros_like(outputs.out_BQHD, dtype=weights[0].dtype)
        for first_HT, (row, start, stop) in zip(weights, forward.segments, strict=True):
            if start < call.first_key:
                continue  # a window dropped its key and value
            value_GD = call.value_BGTD[row, :, start - call.first_key].to(first_HT.dtype)
            value_HD = value_GD.repeat_interleave(heads // len(value_GD), 0) * call.out_scale
            drained_BQHD[row, call.new(start, stop)] = first_HT.t()[..., None] * value_HD
        gate_BQHX = explicit_gate(call)
        if gate_BQHX is not None:
            drained_BQHD *= gate_BQHX
        return outputs.out_BQHD - drained_BQHD.to(outputs.out_BQHD.dtype)


class Steering(HeadChange):
    """See `SteerGates`."""

    reads_attention = True

    def __init__(self, steering: Any):
        self._steering = steering
        self._layers = heads_by_layer(steering.heads)

    def problems(self, heads: Sequence[int]) -> list[str]:
        return head_problems(self._steering.heads, heads)

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        heads = self._layers.get(outputs.layer)
        if heads is None:
            return None
        call = attention_of(outputs, self._steering.kind)
        gate_BQHX = explicit_gate(call)
        is_sink = gate_BQHX is None
        if gate_BQHX is None:
            if call.slot_logit_BHT is None or call.slot_has_value:
                raise UserError(
                    f"steer-gates: layer {outputs.layer} has neither a sink logit nor a gate on "
                    "the outputs of its heads: choose other layers"
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


def attention_of(outputs: HeadOutputs, kind: str) -> AttentionCall:
    """Return the attention call of a layer, if its head outputs are A V, with or without a gate."""
    call, layer = outputs.call, outputs.layer
    assert call is not None
    if call.similarity != "softmax":
        raise UserError(
            f"{kind}: attention of layer {layer} ({call.similarity}) has no softmax weights"
        )
    if call.gated_out_BHTD is not None:
        gate_BHQX = call.explicit_gate_BHTX
        expected_BHQD = call.out_BHTD if gate_BHQX is None else call.out_BHTD * gate_BHQX
        if not torch.allclose(call.gated_out_BHTD, expected_BHQD, rtol=0.02, atol=1e-6):
            raise UserError(
                f"{kind}: the outputs of the heads in layer {layer} are normalized, or a gate is "
                "added to them, before the output projection"
            )
    return call


def explicit_gate(call: AttentionCall) -> Tensor | None:
    """Return the explicit gate [B, Q, H, X] of the outputs; None without one."""
    gate_BHQX = call.explicit_gate_BHTX
    return None if gate_BHQX is None else gate_BHQX.transpose(1, 2)


@torch.no_grad()
def slot_gate(call: AttentionCall, segments: list[Segment]) -> Tensor:
    """Return G = 1 - weight of the slot of every new token, [B, Q, H, 1]; 1 for padding."""
    rows, heads, queries = call.query_BHTD.shape[:3]
    dtype = torch.promote_types(call.query_BHTD.dtype, torch.float32)
    gate_BHQ = call.query_BHTD.new_ones((rows, heads, queries), dtype=dtype)
    measured = attention_statistics(call, segments, {"gate_HT"})
    for statistics, (row, start, stop) in zip(measured, segments, strict=True):
        gate_BHQ[row, :, call.new(start, stop)] = statistics["gate_HT"]
    return gate_BHQ.transpose(1, 2)[..., None]
