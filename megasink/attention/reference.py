"""The executable definition of attention, its log-sum-exp and its gates.

Short, plain and differentiable by autograd in any dtype, with an S x S matrix of weights. Outputs
and gradients of every fast path of this package are tested against it; only tests may call it.

Shapes: B batch, H query heads, G key/value groups (H a multiple of G), T queries, S keys, D head
dim; that of values and outputs may be smaller. z_ij = scale * q_i . k_j + bias over the visible
keys j. The last query is aligned with the last key: with fewer queries than keys, query i is at
position S - T + i.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasink.attention.call import AttentionOutput, Slot, softmax_variant

GATE_ACTIVATIONS = ("sigmoid", "silu", "ns-sigmoid", "identity")
GATE_OPERATIONS = ("multiply", "add")
# P2.31 to P2.36, and the ones whose weights may be negative.
SIMILARITIES = ("sigmoid", "elu-plus-one", "elu-kernel", "identity", "mlp")
SIGNED_SIMILARITIES = ("identity", "mlp")


def reference_slot_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    slot_logit_BHT: Tensor,
    slot_value_BHTD: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    prefix: int = 0,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    distance_bias_HS: Tensor | None = None,
) -> AttentionOutput:
    """Compute softmax attention over the visible keys plus a slot of given logit and value.

    out_i = (sum_j exp(z_ij) v_j + exp(s_i) u_i) / (sum_j exp(z_ij) + exp(s_i)) and
    gate_i = sigmoid(log sum_j exp(z_ij) - s_i): P0 Eq. 1 for u = 0, P0 Eq. 15-16 for the gate.

    Args:
        slot_logit_BHT: s, natural-log units, not multiplied by `scale`; broadcastable to [B, H, T].
        slot_value_BHTD: u, broadcastable to [B, H, T, D]; None for zero.
        scale: Factor of the scores; None for D ** -0.5.
        causal: Mask keys after the token's own position.
        prefix: Keys visible to every token, also earlier ones (prefix LM, P2.18; needs `causal`).
        window: Tokens visible to token i, including itself (needs `causal`; P2.19); None for all.
        cu_seqlens: Boundaries 0, .., S of packed documents: a token sees only its own document, and
            the masks apply within each document; None for one document.
        distance_bias_HS: [H, S or more]; distance_bias_HS[h, i - j] is added to the score of
            key j <= i (P2.20 to P2.22; needs `causal`).
    """
    mask = _Mask(scale, causal, prefix, window, distance_bias_HS)
    if cu_seqlens is not None:
        slot_logit_BHT = slot_logit_BHT.expand(query_BHTD.shape[:3])
        tensors = [query_BHTD, key_BGSD, value_BGSD, slot_logit_BHT]
        if slot_value_BHTD is not None:
            shape = (*query_BHTD.shape[:3], value_BGSD.shape[-1])
            tensors.append(slot_value_BHTD.expand(shape))
        return _each_document(
            lambda *parts: reference_slot_attention(*parts, **mask._asdict()), cu_seqlens, tensors
        )
    scores_BHTS, value_BHSD = _scores(query_BHTD, key_BGSD, value_BGSD, mask)
    slot_logit_BHT = slot_logit_BHT.to(scores_BHTS.dtype).expand(scores_BHTS.shape[:3])
    lse_of_keys_BHT = scores_BHTS.logsumexp(-1)
    lse_BHT = torch.logaddexp(lse_of_keys_BHT, slot_logit_BHT)
    out_BHTD = (scores_BHTS - lse_BHT[..., None]).exp() @ value_BHSD
    if slot_value_BHTD is not None:
        out_BHTD = out_BHTD + (slot_logit_BHT - lse_BHT).exp()[..., None] * slot_value_BHTD
    return AttentionOutput(out_BHTD, lse_BHT, (lse_of_keys_BHT - slot_logit_BHT).sigmoid())


def reference_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    variant: str = "vanilla",
    sink_H: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    prefix: int = 0,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    distance_bias_HS: Tensor | None = None,
) -> AttentionOutput:
    """Compute attention and its implicit gate for the variants of P0.1, P0.2 and P0.6-P0.7.

    vanilla: softmax over the visible keys. Treating key 0 as the sink, the gate of token i is
    1 - A_i0 = sigmoid(LSE over the visible keys 1.. - z_i0), P0 Eq. 22-23: 0 if only key 0 is
    visible (the first token), and 1 if a window hides key 0. Key 0 is the first key of the token's
    own document. sink: one slot with logit `sink_H` and value 0 (P0 Eq. 1). off-by-one: the same
    with a fixed logit of 0.

    Args:
        sink_H: [H], for the sink variant only.
        scale, ..., distance_bias_HS: See `reference_slot_attention`.

    Raises:
        ValueError: The variant is unknown, or `sink_H` does not match it.
    """
    slot = softmax_variant(variant, sink_H).slot
    mask = _Mask(scale, causal, prefix, window, distance_bias_HS)
    tensors = (query_BHTD, key_BGSD, value_BGSD)
    if slot == Slot.GIVEN:
        slot_logit_H = query_BHTD.new_zeros(query_BHTD.shape[1]) if sink_H is None else sink_H
        return reference_slot_attention(
            *tensors, slot_logit_H[None, :, None], cu_seqlens=cu_seqlens, **mask._asdict()
        )
    if cu_seqlens is not None:
        return _each_document(
            lambda *parts: reference_attention(*parts, **mask._asdict()), cu_seqlens, tensors
        )
    scores_BHTS, value_BHSD = _scores(query_BHTD, key_BGSD, value_BGSD, mask)
    out_BHTD = scores_BHTS.softmax(-1) @ value_BHSD
    # Rows that see only key 0 have G = 0, and rows that do not see it have G = 1. They are excluded
    # before the log-sum-exp, not masked after it: a masked infinity still has NaN gradients.
    first_BHT, others_BHTS = scores_BHTS[..., 0], scores_BHTS[..., 1:]
    sees_first_BHT = first_BHT > -torch.inf
    sees_others_BHT = (others_BHTS > -torch.inf).any(-1)
    both_BHT = sees_first_BHT & sees_others_BHT
    gate_BHT = (~sees_first_BHT).to(scores_BHTS.dtype)
    gate_BHT = gate_BHT.masked_scatter(
        both_BHT, (others_BHTS[both_BHT].logsumexp(-1) - first_BHT[both_BHT]).sigmoid()
    )
    return AttentionOutput(out_BHTD, scores_BHTS.logsumexp(-1), gate_BHT)


def reference_biased_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    key_bias_HD: Tensor | None = None,
    value_bias_HD: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    prefix: int = 0,
    window: int | None = None,
    distance_bias_HS: Tensor | None = None,
) -> AttentionOutput:
    """Compute attention with learnable biases per query head (P2.24 to P2.26).

    With a key bias k*, every query sees an extra key k* with value v* (zero without a value bias),
    never masked and not rotated; the gate is the share of the other keys, 1 - A_i*. With only a
    value bias, v* is added to the output, and the gate is that of vanilla attention.

    Args:
        key_bias_HD, value_bias_HD: k*, v*; None for no bias.
        scale, causal, prefix, window, distance_bias_HS: See `reference_slot_attention`.
    """
    mask = _Mask(scale, causal, prefix, window, distance_bias_HS)
    if key_bias_HD is None:
        out_BHTD, lse_BHT, gate_BHT = reference_attention(
            query_BHTD, key_BGSD, value_BGSD, **mask._asdict()
        )
        if value_bias_HD is not None:
            out_BHTD = out_BHTD + value_bias_HD[None, :, None].to(out_BHTD.dtype)
        return AttentionOutput(out_BHTD, lse_BHT, gate_BHT)
    scores_BHTS, value_BHSD = _scores(query_BHTD, key_BGSD, value_BGSD, mask)
    scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    key_BHD1 = key_bias_HD.to(query_BHTD.dtype)[None, ..., None]
    logit_BHT = (scale * query_BHTD @ key_BHD1)[..., 0]
    all_scores = torch.cat((logit_BHT[..., None], scores_BHTS), -1)
    weights = all_scores.softmax(-1)
    out_BHTD = weights[..., 1:] @ value_BHSD
    if value_bias_HD is not None:
        out_BHTD = out_BHTD + weights[..., :1] * value_bias_HD[None, :, None].to(out_BHTD.dtype)
    gate_BHT = (scores_BHTS.logsumexp(-1) - logit_BHT).sigmoid()
    return AttentionOutput(out_BHTD, all_scores.logsumexp(-1), gate_BHT)


def reference_similarity_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    similarity: str,
    normalization: str = "row-sum",
    mlp: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention with a similarity other than exp(z) (P2.30): out_i = sum_j w_ij v_j / Z_i.

    w_ij is, with z_ij = scale * q_i . k_j: sigmoid(z) (P2.31, P2.32); elu(z) + 1 (P2.33);
    scale * (elu(q_i) + 1) . (elu(k_j) + 1) (P2.34, linear attention); z itself (P2.35);
    scale * mlp(q_i) . mlp(k_j) (P2.36). Z_i is 1 (normalization "none") or, for "row-sum", the row
    sum plus 1e-8 for non-negative weights and max(|row sum|, 1) for signed weights (identity, mlp).

    Args:
        similarity: A name in `SIMILARITIES`.
        normalization: "row-sum" or "none".
        mlp: [D, D] weights of the two layers of mlp(x) = relu(x A^T) B^T; for "mlp" only.
        scale, causal, window: See `reference_slot_attention`.

    Returns:
        out_BHTD, and the proxy weight of key 0 (P2.37), |w_i0| / (sum_j |w_ij| + 1e-8), [B, H, T].
    """
    if similarity == "elu-kernel":
        query_BHTD, key_BGSD = F.elu(query_BHTD) + 1, F.elu(key_BGSD) + 1
    elif similarity == "mlp":
        assert mlp is not None
        query_BHTD, key_BGSD = (F.relu(x @ mlp[0].T) @ mlp[1].T for x in (query_BHTD, key_BGSD))
    mask = _Mask(scale, causal, 0, window, None)
    scores_BHTS, value_BHSD = _scores(query_BHTD, key_BGSD, value_BGSD, mask)
    hidden_BHTS = scores_BHTS == -torch.inf
    scores_BHTS = scores_BHTS.masked_fill(hidden_BHTS, 0.0)
    weights_BHTS = {"sigmoid": torch.sigmoid, "elu-plus-one": lambda z: F.elu(z) + 1}.get(
        similarity, lambda z: z
    )(scores_BHTS)
    weights_BHTS = weights_BHTS.masked_fill(hidden_BHTS, 0.0)
    out_BHTD = weights_BHTS @ value_BHSD
    sum_BHT1 = weights_BHTS.sum(-1, keepdim=True)
    if normalization == "row-sum" and similarity in SIGNED_SIMILARITIES:
        out_BHTD = out_BHTD / sum_BHT1.abs().clamp_min(1.0)
    elif normalization == "row-sum":
        out_BHTD = out_BHTD / (sum_BHT1 + 1e-8)
    size_BHTS = weights_BHTS.abs()
    return out_BHTD, size_BHTS[..., 0] / (size_BHTS.sum(-1) + 1e-8)


def reference_gate(
    x_THD: Tensor,
    score_THC: Tensor,
    *,
    activation: str = "sigmoid",
    operation: str = "multiply",
    shared_heads: bool = False,
) -> tuple[Tensor, Tensor]:
    """Apply an explicit gate to a tensor with heads (P1 Eq. 5; P1.2 to P1.15).

    gate = f(score), averaged over the heads if they share it (P1.9), and out = x * gate or
    x + gate.

    Args:
        x_THD: [..., H, D], the tensor to gate; H is G for keys and values.
        score_THC: Broadcastable to [..., H, C]; C is 1 for one score per head, D for one per
            element.
        activation: f, one of `GATE_ACTIVATIONS`; ns-sigmoid is 0.5 + 0.5 sigmoid (P1.14).
        operation: One of `GATE_OPERATIONS`.

    Returns:
        out [..., H, D] and gate [..., H, C].
    """
    functions = {
        "sigmoid": torch.sigmoid,
        "silu": lambda score: score * score.sigmoid(),
        "ns-sigmoid": lambda score: 0.5 + 0.5 * score.sigmoid(),
        "identity": lambda score: score,
    }
    gate_THC = functions[activation](score_THC)
    if shared_heads:
        gate_THC = gate_THC.mean(-2, keepdim=True)
    gate_THC = gate_THC.expand(*x_THD.shape[:-1], score_THC.shape[-1])
    return x_THD * gate_THC if operation == "multiply" else x_THD + gate_THC, gate_THC


def reference_switch(expert_TEX: Tensor, score_TE: Tensor, *, top_k: int) -> Tensor:
    """Sum a token's `top_k` experts of highest score, each times sigmoid(score) (P1.39).

    Of equal scores the first counts. SwitchHead's weights do not compete: their sum is not 1.

    Args:
        expert_TEX: [..., E, X], the projections of a token by each of E experts.
        score_TE: [..., E].

    Returns:
        [..., X].
    """
    index_E = torch.arange(score_TE.shape[-1], device=score_TE.device)
    other_T1E, own_TE1 = score_TE[..., None, :], score_TE[..., None]
    first_EE = index_E[None, :] < index_E[:, None]
    before_TEE = (other_T1E > own_TE1) | ((other_T1E == own_TE1) & first_EE)
    weight_TE = score_TE.sigmoid() * (before_TEE.sum(-1) < top_k)
    return (expert_TEX * weight_TE[..., None]).sum(-2)


def reference_head_norm(x_THD: Tensor, weight_HD: Tensor | None, *, eps: float = 1e-5) -> Tensor:
    """Apply a nonlinearity of P1 Table 3 to the SDPA output: RMSNorm per head (P1.16) or SiLU.

    Args:
        x_THD: [..., H, D].
        weight_HD: RMSNorm weight; None for SiLU.
    """
    if weight_HD is None:
        return x_THD * x_THD.sigmoid()
    return x_THD / (x_THD.square().mean(-1, keepdim=True) + eps).sqrt() * weight_HD


class _Mask(NamedTuple):
    """The mask and score arguments of `reference_slot_attention`."""

    scale: float | None
    causal: bool
    prefix: int
    window: int | None
    distance_bias_HS: Tensor | None


def _scores(
    query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, mask: _Mask
) -> tuple[Tensor, Tensor]:
    """Return z_ij, with -inf where j is hidden from i, and the values repeated per query head."""
    heads, groups = query_BHTD.shape[1], key_BGSD.shape[1]
    key_BHSD = key_BGSD.repeat_interleave(heads // groups, dim=1)
    value_BHSD = value_BGSD.repeat_interleave(heads // groups, dim=1)
    scale = query_BHTD.shape[-1] ** -0.5 if mask.scale is None else mask.scale
    scores_BHTS = scale * query_BHTD @ key_BHSD.transpose(-1, -2)
    if not mask.causal:
        if mask.window is not None or mask.prefix or mask.distance_bias_HS is not None:
            raise ValueError("a window, a prefix and a distance bias need the causal mask")
        return scores_BHTS, value_BHSD
    queries, keys = scores_BHTS.shape[-2:]
    position_S = torch.arange(keys, device=query_BHTD.device)
    distance_TS = position_S[keys - queries :, None] - position_S[None, :]
    visible_TS = (distance_TS >= 0) | (position_S < mask.prefix)
    if mask.window is not None:
        visible_TS &= distance_TS < mask.window
    if mask.distance_bias_HS is not None:
        bias_HS = mask.distance_bias_HS.to(scores_BHTS.dtype)
        scores_BHTS = scores_BHTS + bias_HS[:, distance_TS.clamp(min=0)]
    return scores_BHTS.masked_fill(~visible_TS, -torch.inf), value_BHSD


def _each_document(
    attend: Callable[..., AttentionOutput], cu_seqlens: Sequence[int], tensors: Sequence[Tensor]
) -> AttentionOutput:
    """Attend within each document that has queries and concatenate the results."""
    outputs, keys = [], tensors[1].shape[2]
    for start, stop in pairwise(cu_seqlens):
        # A tensor with a row per query begins later than the keys.
        starts = [keys - tensor.shape[2] for tensor in tensors]
        if stop > max(start, starts[0]):
            parts = zip(tensors, starts, strict=True)
            outputs.append(attend(*(t[:, :, max(start - s, 0) : stop - s] for t, s in parts)))
    out_BHTD, lse_BHT, gate_BHT = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
    return AttentionOutput(out_BHTD, lse_BHT, gate_BHT)
