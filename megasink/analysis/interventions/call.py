"""What an intervention reads of a layer's attention: its call and its gate.

Shapes: B rows, H query heads, Q new tokens, X 1 or D, the head dim.
"""

import torch
from torch import Tensor

from megasink.analysis.capture.changes import HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall, attention_statistics
from megasink.errors import UserError


def attention_of(outputs: HeadOutputs, kind: str) -> AttentionCall:
    """Return the call of a layer whose outputs are A V times an explicit gate, or A V alone."""
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
