"""The value drain: the first token's value is zero for chosen heads (P0.27, P0.28).

Shapes: B rows, Q tokens, T tokens of a sample, N samples, H query heads, G key/value groups, D head
dim.
"""

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall, attention_statistics
from megasink.analysis.interventions.call import attention_of, explicit_gate
from megasink.analysis.interventions.kinds import DrainFirstValue


class Drain(HeadChange):
    """See `DrainFirstValue`."""

    reads_attention = True

    def __init__(self, threshold: float | None, phase: str):
        self._threshold, self._phase = threshold, phase
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
        call = attention_of(outputs, DrainFirstValue.kind)
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
