"""What an intervention reads of a layer's attention: its call, its gate, and weights after a cache.

Shapes: B rows, H query heads, G key/value groups, R heads of a group, Q new tokens, C some of them,
K keys, D head dim, X 1 or D.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megasink.analysis.capture.changes import ForwardPass, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall, attention_statistics
from megasink.errors import UserError

ROWS = 64
"""Rows of new tokens whose weights are computed together."""


def attention_of(outputs: HeadOutputs, kind: str) -> AttentionCall:
    """Return the call of a layer whose outputs are A V times an explicit gate, or A V alone.

    Args:
        kind: of the intervention, for errors.

    Raises:
        UserError: the weights are not those of a softmax, or a norm or an added gate follows.
    """
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


class NewRows(NamedTuple):
    """Weights of the new tokens of one row of the batch; float32, or float64 for float64.

    Attributes:
        first_weight_HQ: A_i0; 0 where a window hides the first token, also if the cache of a
            window has dropped it.
        gate_HQ: G = 1 - weight of the slot; 1 without a slot.
    """

    first_weight_HQ: Tensor
    gate_HQ: Tensor


@torch.no_grad()
def weights_after_cache(call: AttentionCall, forward: ForwardPass, segment: Segment) -> NewRows:
    """Return the weights of a row's new tokens, over the keys of the cache and their own.

    Takes O(K) work for each head and token.
    """
    query_HQD = call.query_BHTD[segment.row]
    dtype = torch.promote_types(query_HQD.dtype, torch.float32)
    queries, keys = query_HQD.shape[1], call.key_BGTD.shape[2]
    first_key = forward.cached + queries - keys
    start = max(segment.start - first_key, 0)
    key_GKD = call.key_BGTD[segment.row, :, start:].to(dtype)
    before = keys - start - queries
    new_rows = NewRows(*(query_HQD.new_ones(query_HQD.shape[:2], dtype=dtype) for _ in range(2)))
    slot_HQ = None
    if call.slot_logit_BHT is not None:
        slot_HQ = call.slot_logit_BHT.expand(call.query_BHTD.shape[:3])[segment.row].to(dtype)
    for top in range(0, queries, ROWS):
        rows = slice(top, min(top + ROWS, queries))
        query_GRCD = query_HQD[:, rows].to(dtype).unflatten(0, (len(key_GKD), -1))
        score_HCK = torch.einsum("grcd,gkd->grck", query_GRCD, key_GKD).flatten(0, 1) * call.scale
        if call.softcap is not None:
            score_HCK = torch.tanh(score_HCK / call.softcap) * call.softcap
        key_K = torch.arange(score_HCK.shape[-1], device=score_HCK.device)
        distance_CK = before + torch.arange(rows.start, rows.stop, device=key_K.device)[:, None]
        distance_CK = distance_CK - key_K
        if call.distance_bias_HT is not None:
            score_HCK = score_HCK + call.distance_bias_HT.to(dtype)[:, distance_CK.clamp(min=0)]
        hidden_CK = distance_CK < 0
        if call.window is not None:
            hidden_CK = hidden_CK | (distance_CK >= call.window)
        score_HCK = score_HCK.masked_fill(hidden_CK, -torch.inf)
        lse_HC = score_HCK.logsumexp(-1)
        if slot_HQ is not None:
            new_rows.gate_HQ[:, rows] = torch.sigmoid(lse_HC - slot_HQ[:, rows])
            lse_HC = torch.logaddexp(lse_HC, slot_HQ[:, rows])
        new_rows.first_weight_HQ[:, rows] = (score_HCK[..., 0] - lse_HC).exp()
    if segment.start < first_key:
        new_rows.first_weight_HQ.zero_()
    return new_rows


@torch.no_grad()
def slot_gate(call: AttentionCall, forward: ForwardPass) -> Tensor:
    """Return G = 1 - weight of the slot of every new token, [B, Q, H, 1]; 1 for padding."""
    rows, heads, queries = call.query_BHTD.shape[:3]
    dtype = torch.promote_types(call.query_BHTD.dtype, torch.float32)
    gate_BHQ = call.query_BHTD.new_ones((rows, heads, queries), dtype=dtype)
    if forward.cached:
        for segment in forward.segments:
            gate_BHQ[segment.row] = weights_after_cache(call, forward, segment).gate_HQ
        return gate_BHQ.transpose(1, 2)[..., None]
    measured = attention_statistics(call, forward.segments, {"gate_HT"})
    for statistics, (row, start, stop) in zip(measured, forward.segments, strict=True):
        gate_BHQ[row, :, start:stop] = statistics["gate_HT"]
    return gate_BHQ.transpose(1, 2)[..., None]
