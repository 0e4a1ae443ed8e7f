"""Interventions that read attention: drain the first value, steer gates.

Shapes: B rows, Q tokens of this call, T tokens of a sample, N samples, H query heads, G key/value
groups, D head dim, X 1 or D.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasink.analysis.capture.attention_statistics import AttentionCall, attention_statistics
from megasink.analysis.capture.head_changes import ForwardPass, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.heads import Heads, head_problems, normalized_heads
from megasink.analysis.interventions.intervention_types import Intervention, heads_in, kind
from megasink.errors import UserError

PHASES = ("prefill", "decode", "both")


def _state(made: Callable[[], Any]) -> Any:
    """Return a field that belongs to one run and not to the intervention."""
    return field(init=False, repr=False, compare=False, default_factory=made)


@kind
class DrainFirstValue(Intervention):
    """Set v_0 to zero: subtract A_i0 v_0 from the outputs of heads, without renormalizing A.

    The first token is the first real one of each sequence. Query heads of a group share v_0, so
    the output is changed per query head and the cache is left alone. A gate multiplies what is
    subtracted; key 0 has no weight where a window hides it. Padding is left alone.

    P0's scores on log-likelihood tasks, where nothing is decoded, change (MMLU 75.42 to 50.27 for
    all heads), so the tokens of the prompt see it: "both" is the default.
    """

    kind: ClassVar[str] = "drain-first-value"
    source: ClassVar[str] = "P0.27, P0.28"

    reads_attention = True

    # Drain a sample's heads whose mean weight on the first token over the pass without a cache (the
    # prompt) is strictly above this, such as 0.75 (P0.28, Eq. 9); None drains all (P0.27).
    threshold: float | None = None
    # "prefill" (passes without a cache), "decode" (those that continue one), or "both".
    phase: str = "both"
    # What the pass without a cache decided: layer -> bool [N, H], and its sequences.
    _masks: dict[int, Tensor] = _state(dict)
    _segments: list[Segment] = _state(list)

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise UserError(f"phase {self.phase!r}: choose {', '.join(PHASES)}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise UserError(f"threshold {self.threshold!r}: use a mean weight between 0 and 1")

    def begin(self, forward: ForwardPass) -> None:
        if not forward.cached:
            self._masks.clear()
            self._segments[:] = forward.segments
        elif self.threshold is not None and self.phase != "prefill":
            forward.check_continues(self._segments if self._masks else [])

    @torch.no_grad()
    def _first_weights(self, call: AttentionCall, forward: ForwardPass, layer: int) -> list[Tensor]:
        """Return A_i0 [H, T] of each sample's tokens in this call, 0 for heads to leave alone."""
        of = attention_statistics(call, forward.segments, {"first_weight_HT"})
        weights = [statistics["first_weight_HT"] for statistics in of]
        if self.threshold is None:
            return weights
        if not forward.cached:
            awft_NH = torch.stack([first_HT.mean(-1) for first_HT in weights])
            self._masks[layer] = awft_NH > self.threshold
        masked = zip(weights, self._masks[layer], strict=True)
        return [first_HT * mask_H[:, None] for first_HT, mask_H in masked]

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        call = _attention_of(outputs, self.kind)
        here = "decode" if forward.cached else "prefill"
        drains = self.phase in (here, "both")
        if not drains and (forward.cached or self.threshold is None):
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
        gate_BQHX = _explicit_gate(call)
        if gate_BQHX is not None:
            drained_BQHD *= gate_BQHX
        return outputs.out_BQHD - drained_BQHD.to(outputs.out_BQHD.dtype)


@kind
class SteerGates(Intervention):
    """Scale or clamp G of chosen heads: scale * G, but at least minimum and at most maximum.

    Only gated models have such a gate: G = 1 - the weight of the sink logit (P0.2), or the score
    of an explicit gate on the output of attention (P1.10). A plain model has none to steer, nor
    has one with a sink token.

    A gate that is exactly 0 stays 0 if it belongs to a sink, as the output behind it is lost.
    """

    kind: ClassVar[str] = "steer-gates"
    source: ClassVar[str] = "P0.2, P1.10; steering is megasink's own"

    reads_attention = True

    heads: Heads  # (layer, head) pairs, both from 0
    scale: float = 1.0  # factor of G, 0 or more
    minimum: float | None = None  # limits of G, in [0, 1]
    maximum: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        given = (self.scale, self.minimum, self.maximum)
        if given == (1.0, None, None):
            raise UserError("nothing to steer: give scale, minimum or maximum")
        if not 0 <= self.scale < math.inf:
            raise UserError(f"scale {self.scale:g}: use 0 or more")
        low = 0.0 if self.minimum is None else self.minimum
        high = 1.0 if self.maximum is None else self.maximum
        if not 0 <= low <= high <= 1:
            raise UserError(f"minimum {low:g}, maximum {high:g}: use 0 <= minimum <= maximum <= 1")

    def problems(self, heads: Sequence[int]) -> list[str]:
        return head_problems(self.heads, heads)

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        if not (heads := heads_in(self.heads, outputs.layer)):
            return None
        call = _attention_of(outputs, self.kind)
        gate_BQHX = _explicit_gate(call)
        if is_sink := gate_BQHX is None:
            if call.slot_logit_BHT is None or call.slot_has_value:
                raise UserError(
                    f"steer-gates: layer {outputs.layer} has neither a sink logit nor a gate on "
                    "the outputs of its heads: choose other layers"
                )
            gate_BQHX = _slot_gate(call, forward.segments)
        gate_BQHX = gate_BQHX[:, :, heads]
        wanted = gate_BQHX * self.scale
        if self.minimum is not None or self.maximum is not None:
            wanted = wanted.clamp(self.minimum, self.maximum)
        out_BQHD = outputs.out_BQHD.clone()
        closed = gate_BQHX == 0
        factor = torch.where(closed, 0.0, wanted / gate_BQHX.masked_fill(closed, 1.0))
        steered = out_BQHD[:, :, heads] * factor.to(out_BQHD.dtype)
        if not is_sink:
            ungated = call.out_BHTD.transpose(1, 2)[:, :, heads]
            steered = torch.where(closed, ungated * wanted.to(ungated.dtype), steered)
        out_BQHD[:, :, heads] = steered
        return out_BQHD


def _attention_of(outputs: HeadOutputs, kind: str) -> AttentionCall:
    """Return the attention call of a layer, if its head outputs are A V, with or without a gate."""
    call, layer = outputs.call, outputs.layer
    assert call is not None
    if call.similarity != "softmax":
        raise UserError(
            f"{kind}: attention of layer {layer} ({call.similarity}) has no softmax weights: "
            "choose other layers"
        )
    if call.gated_out_BHTD is not None:
        gate_BHQX = call.explicit_gate_BHTX
        expected_BHQD = call.out_BHTD if gate_BHQX is None else call.out_BHTD * gate_BHQX
        if not torch.allclose(call.gated_out_BHTD, expected_BHQD, rtol=0.02, atol=1e-6):
            raise UserError(
                f"{kind}: layer {layer} normalizes the outputs of its heads, or adds a gate to "
                "them, before the output projection: choose other layers"
            )
    return call


def _explicit_gate(call: AttentionCall) -> Tensor | None:
    """Return the explicit gate [B, Q, H, X] of the outputs; None without one."""
    gate_BHQX = call.explicit_gate_BHTX
    return None if gate_BHQX is None else gate_BHQX.transpose(1, 2)


@torch.no_grad()
def _slot_gate(call: AttentionCall, segments: list[Segment]) -> Tensor:
    """Return G = 1 - weight of the slot of every new token, [B, Q, H, 1]; 1 for padding."""
    rows, heads, queries = call.query_BHTD.shape[:3]
    dtype = torch.promote_types(call.query_BHTD.dtype, torch.float32)
    gate_BHQ = call.query_BHTD.new_ones((rows, heads, queries), dtype=dtype)
    measured = attention_statistics(call, segments, {"gate_HT"})
    for statistics, (row, start, stop) in zip(measured, segments, strict=True):
        gate_BHQ[row, :, call.new(start, stop)] = statistics["gate_HT"]
    return gate_BHQ.transpose(1, 2)[..., None]
