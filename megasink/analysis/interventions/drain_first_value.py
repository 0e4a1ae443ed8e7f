"""The value drain: the first token's value is zero for chosen heads (P0.27, P0.28).

Shapes: B rows, Q tokens, T tokens of a sample, N samples, H query heads, G key/value groups, D head
dim.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall, attention_statistics
from megasink.analysis.interventions.call import attention_of, explicit_gate
from megasink.analysis.interventions.record import Intervention

PHASES = ("prefill", "decode", "both")


@dataclass(frozen=True)
class DrainFirstValue(Intervention):
    """Set v_0 to zero: subtract A_i0 v_0 from the outputs of heads, without renormalizing A.

    The first token is the first real one of each sequence. Query heads of a group share v_0, so
    the output is changed per query head and the cache is left alone. A gate multiplies what is
    subtracted; key 0 has no weight where a window hides it. Padding is left alone.

    The paper zeroes v_0 "after generating the KV cache" (App. A) and does not say whether the
    tokens of the prompt see it. Its scores on log-likelihood tasks, where nothing is decoded, do
    change (MMLU 75.42 to 50.27 for all heads), so they do: "both" is the default. Nor does it say
    of which tokens Eq. 9 averages; here it is over the tokens of the prompt, of each sample.

    Attributes:
        threshold: drain a sample's heads whose mean weight on the first token over the pass
            without a cache (the prompt) is strictly above this, such as 0.75 (P0.28, Eq. 9); None
            drains all (P0.27).
        phase: "prefill" (passes without a cache), "decode" (those that continue one), or "both".

    Raises:
        ValueError: a threshold outside [0, 1], or an unknown phase.
    """

    kind: ClassVar[str] = "drain-first-value"
    source: ClassVar[str] = "P0.27, P0.28"

    threshold: float | None = None
    phase: str = "both"

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r}: choose {', '.join(PHASES)}")
        if self.threshold is None:
            return
        is_number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not is_number or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold {self.threshold!r}: a mean weight is in [0, 1]")

    def change(self) -> HeadChange:
        """Return the change."""
        return _Drain(self.threshold, self.phase)


class _Drain(HeadChange):
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
