"""Attention with other similarities than exp (P2.30 to P2.37), a chunk of query rows at a time.

out_i = sum_j w_ij v_j / Z_i. Feature maps (elu + 1, the MLP) are applied to queries and keys first;
what is left is a function of z_ij = scale * q_i . k_j. Chunks of rows are computed again in the
backward, so the largest temporaries are [B, H, CHUNK, S]. Everything is float32 (float64 for
float64 inputs), float16 and bfloat16 inputs too.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, C a chunk of them,
S keys, K keys that the chunk sees, D head dim. The last query stands at the last key.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasink.attention.functional import check_shapes
from megasink.attention.layout import empty_in_order_of, statistics_dtype
from megasink.attention.reference import SIGNED_SIMILARITIES, SIMILARITIES
from megasink.definitions import PROXY_EPSILON

CHUNK = 256
NORMALIZATIONS = ("row-sum", "none")


class SimilarityOutput(NamedTuple):
    """What attention with a similarity returns.

    Attributes:
        out_BHTD: in the dtype of the query, its dimensions in the memory order of the query's.
        first_weight_BHT: the proxy weight of key 0 (P2.37), |w_i0| / (sum_j |w_ij| + 1e-8),
            statistics dtype, without gradient; 0 where a window hides key 0.
    """

    out_BHTD: Tensor
    first_weight_BHT: Tensor


def similarity_attention(
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
) -> SimilarityOutput:
    """What `reference_similarity_attention` defines, with its gradients, and nothing S x S.

    Args:
        query_BHTD, key_BGSD, value_BGSD: float16, bfloat16, float32 or float64, any strides.
        similarity: a name of `SIMILARITIES`.
        normalization: "row-sum" or "none".
        mlp: the two [D, D] weights, for "mlp" only.
        scale: factor of the scores; None for D ** -0.5.
        causal: a token sees no key after its own position.
        window: tokens visible to a token, itself included; None for all.

    Raises:
        ValueError: an unknown name, `mlp` without "mlp" or the other way round, a window without
            the causal mask, shapes that do not fit together.
    """
    check_shapes(query_BHTD, key_BGSD, value_BGSD, causal)
    if similarity not in SIMILARITIES:
        raise ValueError(f"unknown similarity {similarity!r}: one of {', '.join(SIMILARITIES)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {normalization!r}: row-sum or none")
    if (similarity == "mlp") != (mlp is not None):
        raise ValueError(f"the weights of an MLP go with similarity 'mlp'; got {similarity!r}")
    if window is not None and not causal:
        raise ValueError("a window needs the causal mask")
    signed = similarity in SIGNED_SIMILARITIES
    mapped_query_BHTD, mapped_key_BGSD = (
        feature_map(x, similarity, mlp) for x in (query_BHTD, key_BGSD)
    )
    options = _Options(
        similarity,
        "none" if normalization == "none" else "clamped" if signed else "sum",
        query_BHTD.shape[-1] ** -0.5 if scale is None else scale,
        causal,
        window,
    )
    out_BHTD, first_BHT, _ = _Similarity.apply(
        mapped_query_BHTD, mapped_key_BGSD, value_BGSD, options
    )
    return SimilarityOutput(out_BHTD.to(query_BHTD.dtype), first_BHT)


@torch.no_grad()
def first_key_weight(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    *,
    similarity: str = "softmax",
    mlp: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """How much each token attends to key 0, for the sink metric (P2.37, P2.38): [B, H, T].

    The proxy |w_i0| / sum_j |w_ij| of a similarity, or the softmax weight. Neither normalisation
    nor the scale alpha of the scores enters: with alpha 0.2 no weight could exceed a threshold of
    0.3. Causal; no gradient; no S x S.

    Args:
        query_BHTD, key_BGSD: as given to attention, after RoPE.
        similarity: "softmax" or a name of `SIMILARITIES`.
        mlp, scale, window: as in `similarity_attention`.
    """
    scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    query_BGRTD, key_BG1SD = _grouped(
        feature_map(query_BHTD, similarity, mlp), feature_map(key_BGSD, similarity, mlp)
    )
    options = _Options(similarity, "none", scale, True, window)
    first_BGRT = query_BGRTD.new_empty(query_BGRTD.shape[:-1])
    for rows, keys, hidden_CK in _chunks(query_BHTD, key_BGSD, options):
        scores_BGRCK = _scores(query_BGRTD, key_BG1SD, rows, keys, scale)
        if similarity == "softmax":
            weights_BGRCK = scores_BGRCK.masked_fill_(hidden_CK, -torch.inf).softmax(-1)
        else:
            weights_BGRCK = _weights(scores_BGRCK, similarity).masked_fill_(hidden_CK, 0.0)
        first_BGRT[..., rows] = _first_weight(weights_BGRCK, keys, similarity != "softmax")
    return first_BGRT.flatten(1, 2)


@dataclass(frozen=True)
class _Options:
    similarity: str
    denominator: str  # "none", "sum" or "clamped": 1, the row's sum, max(|the row's sum|, 1)
    scale: float
    causal: bool
    window: int | None


class _Similarity(torch.autograd.Function):
    """Rows by chunks; saves its inputs, its output and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
        out_BHTD = empty_in_order_of(query_BHTD)
        out_BGRTD = out_BHTD.unflatten(1, query_BGRTD.shape[1:3])
        first_BGRT, sum_BGRT = (query_BGRTD.new_empty(query_BGRTD.shape[:-1]) for _ in range(2))
        for rows, keys, hidden_CK in _chunks(query_BHTD, key_BGSD, options):
            scores_BGRCK = _scores(query_BGRTD, key_BG1SD, rows, keys, options.scale)
            weights_BGRCK = _weights(scores_BGRCK, options.similarity)
            weights_BGRCK.masked_fill_(hidden_CK, 0.0)
            sum_BGRC = weights_BGRCK.sum(-1)
            rows_BGRCD = weights_BGRCK @ value_BG1SD[..., keys, :]
            out_BGRTD[..., rows, :] = (
                rows_BGRCD / _denominator(sum_BGRC, options.denominator)[..., None]
            )
            sum_BGRT[..., rows] = sum_BGRC
            first_BGRT[..., rows] = _first_weight(weights_BGRCK, keys)
        first_BHT, sum_BHT = first_BGRT.flatten(1, 2), sum_BGRT.flatten(1, 2)
        ctx.save_for_backward(query_BHTD, key_BGSD, value_BGSD, out_BHTD, sum_BHT)
        ctx.options = options
        ctx.mark_non_differentiable(first_BHT, sum_BHT)
        return out_BHTD, first_BHT, sum_BHT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out_BHTD: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BHTD, key_BGSD, value_BGSD, out_BHTD, sum_BHT = ctx.saved_tensors
        options: _Options = ctx.options
        query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
        shape = query_BGRTD.shape[1:3]
        grad_query_BHTD = empty_in_order_of(query_BHTD)
        grad_query_BGRTD = grad_query_BHTD.unflatten(1, shape)
        dtype = query_BGRTD.dtype
        grad_key_BGSD, grad_value_BGSD = (
            torch.zeros_like(x, dtype=dtype) for x in (key_BGSD, value_BGSD)
        )
        for rows, keys, hidden_CK in _chunks(query_BHTD, key_BGSD, options):
            sum_BGRC1 = sum_BHT.unflatten(1, shape)[..., rows, None]
            denominator_BGRC1 = _denominator(sum_BGRC1, options.denominator)
            # With N = sum_j w_j v_j and out = N / Z: dN = dO / Z and dZ = -(dO . out) / Z.
            grad_out_BGRCD = grad_out_BHTD.unflatten(1, shape)[..., rows, :].to(dtype)
            grad_out_BGRCD = grad_out_BGRCD / denominator_BGRC1
            out_BGRCD = out_BHTD.unflatten(1, shape)[..., rows, :]
            scores_BGRCK = _scores(query_BGRTD, key_BG1SD, rows, keys, options.scale)
            grad_weights_BGRCK = grad_out_BGRCD @ value_BG1SD[..., keys, :].transpose(-1, -2)
            if options.denominator != "none":
                grad_sum_BGRC1 = (grad_out_BGRCD * out_BGRCD).sum(-1, keepdim=True)
                if options.denominator == "clamped":
                    grad_sum_BGRC1 *= sum_BGRC1.sign() * (sum_BGRC1.abs() >= 1.0)
                grad_weights_BGRCK -= grad_sum_BGRC1
            weights_BGRCK = _weights(scores_BGRCK, options.similarity)
            grad_scores_BGRCK = grad_weights_BGRCK
            grad_scores_BGRCK *= _derivative(scores_BGRCK, weights_BGRCK, options.similarity)
            grad_scores_BGRCK.masked_fill_(hidden_CK, 0.0).mul_(options.scale)
            weights_BGRCK.masked_fill_(hidden_CK, 0.0)
            grad_query_BGRTD[..., rows, :] = grad_scores_BGRCK @ key_BG1SD[..., keys, :]
            grad_key_BGSD[..., keys, :] += _sum_over_group(
                grad_scores_BGRCK, query_BGRTD[..., rows, :]
            )
            grad_value_BGSD[..., keys, :] += _sum_over_group(weights_BGRCK, grad_out_BGRCD)
        return (
            grad_query_BHTD,
            grad_key_BGSD.to(key_BGSD.dtype),
            grad_value_BGSD.to(value_BGSD.dtype),
            None,
        )


def feature_map(x: Tensor, similarity: str, mlp: tuple[Tensor, Tensor] | None) -> Tensor:
    """phi of P2.30, on queries or keys [..., D]; the identity for most similarities.

    Args:
        mlp: the two [D, D] weights, for "mlp".
    """
    if similarity not in ("elu-kernel", "mlp"):
        return x
    x = x.to(statistics_dtype(x.dtype))
    if mlp is None:
        # exp on one side and 1 + x on the other: elu(x) + 1 would lose exp(x) below 1e-7.
        return x.clamp(max=0.0).exp() + F.relu(x)
    first_DD, second_DD = (weight.to(x.dtype) for weight in mlp)
    return F.linear(F.relu(F.linear(x, first_DD)), second_DD)


def _weights(scores: Tensor, similarity: str) -> Tensor:
    """w of z, in a new tensor."""
    if similarity == "sigmoid":
        return scores.sigmoid()
    if similarity == "elu-plus-one":
        return scores.clamp(max=0.0).exp_().add_(F.relu(scores))
    return scores.clone()


def _derivative(scores: Tensor, weights: Tensor, similarity: str) -> Tensor | float:
    """dw/dz."""
    if similarity == "sigmoid":
        return torch.addcmul(weights, weights, weights, value=-1.0)
    if similarity == "elu-plus-one":
        return scores.clamp(max=0.0).exp_()
    return 1.0


def _denominator(row_sum: Tensor, kind: str) -> Tensor:
    if kind == "none":
        return torch.ones_like(row_sum)
    return row_sum + PROXY_EPSILON if kind == "sum" else row_sum.abs().clamp_min(1.0)


def _first_weight(weights_BGRCK: Tensor, keys: slice, epsilon: bool = True) -> Tensor:
    """|w_i0| over the sum of the row's |w_ij|, [B, G, R, C]."""
    if keys.start > 0:
        return torch.zeros_like(weights_BGRCK[..., 0])
    row_sum_BGRC = torch.linalg.vector_norm(weights_BGRCK, ord=1, dim=-1)
    return weights_BGRCK[..., 0].abs() / (row_sum_BGRC + (PROXY_EPSILON if epsilon else 0.0))


def _grouped(query_BHTD: Tensor, *keys_BGSD: Tensor) -> tuple[Tensor, ...]:
    """Query as [B, G, R, T, D] and keys as [B, G, 1, S, D], in the statistics dtype."""
    dtype = statistics_dtype(query_BHTD.dtype)
    query_BGRTD = query_BHTD.to(dtype).unflatten(1, (keys_BGSD[0].shape[1], -1))
    return query_BGRTD, *(tensor.to(dtype).unsqueeze(2) for tensor in keys_BGSD)


def _chunks(
    query_BHTD: Tensor, key_BGSD: Tensor, options: _Options
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, the keys that some of them see, True where a row does not see a key [C, K])."""
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    position_S = torch.arange(keys, device=key_BGSD.device)
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        first, last = 0, keys
        hidden_CK = torch.zeros((1, 1), dtype=torch.bool, device=key_BGSD.device)
        if options.causal:
            begin, last = start + keys - queries, stop + keys - queries
            if options.window is not None:
                first = max(0, begin - options.window + 1)
            distance_CK = position_S[begin:last, None] - position_S[first:last]
            hidden_CK = distance_CK < 0
            if options.window is not None:
                hidden_CK |= distance_CK >= options.window
        yield slice(start, stop), slice(first, last), hidden_CK


def _scores(
    query_BGRTD: Tensor, key_BG1SD: Tensor, rows: slice, keys: slice, scale: float
) -> Tensor:
    return (query_BGRTD[..., rows, :] @ key_BG1SD[..., keys, :].transpose(-1, -2)).mul_(scale)


def _sum_over_group(weights_BGRCK: Tensor, rows_BGRCD: Tensor) -> Tensor:
    """sum over heads of the group and rows of weight_ck * row_cd, as [B, G, K, D]."""
    return weights_BGRCK.flatten(2, 3).transpose(-1, -2) @ rows_BGRCD.flatten(2, 3)
