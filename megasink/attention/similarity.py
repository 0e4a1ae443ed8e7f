"""Attention with similarities other than exp (P2.30 to P2.37), chunked over query rows.

out_i = sum_j w_ij v_j / Z_i. Feature maps (elu + 1, the MLP) are applied to queries and keys first;
the weights are then a function of z_ij = scale * q_i . k_j. The backward recomputes the chunks, so
the largest temporaries are [B, H, CHUNK, S]; with torch.utils.checkpoint in its place a step takes
2.5 times the memory. All computation is in float32 (float64 for float64 inputs), also for float16
and bfloat16 inputs.

Shapes: B batch, H query heads, G key/value groups, R heads per group, T queries, C queries of a
chunk, S keys, K keys visible to the chunk, D head dim. The last query is at the last key.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megasink.attention.constants import PROXY_EPSILON
from megasink.attention.functional import check_shapes
from megasink.attention.layout import empty_in_order_of, statistics_dtype, without_autocast
from megasink.attention.reference import SIGNED_SIMILARITIES, SIMILARITIES
from megasink.attention.row_chunks import grouped, products, row_chunks, sum_over_group

NORMALIZATIONS = ("row-sum", "none")


def _uncast[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Run the function without autocast."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_autocast():
            return function(*args, **kwargs)

    return run


class SimilarityOutput(NamedTuple):
    """The result of `similarity_attention`.

    Attributes:
        out_BHTD: Output in the dtype and memory order of the query.
        first_weight_BHT: Proxy weight of key 0 (P2.37), |w_i0| / (sum_j |w_ij| + 1e-8), in the
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
    """Compute `reference_similarity_attention` with gradients and without S x S tensors.

    Args:
        query_BHTD, key_BGSD, value_BGSD: float16, bfloat16, float32 or float64, any strides.
        similarity: A name in `SIMILARITIES`.
        normalization: "row-sum" or "none".
        mlp: The two [D, D] weights, for "mlp" only.
        scale: Factor of the scores; None for D ** -0.5.
        causal: Mask keys after the token's own position.
        window: Tokens visible to a token, including itself; None for all.

    Raises:
        ValueError: A name is unknown, `mlp` does not match the similarity, a window is given
            without the causal mask, or shapes are incompatible.
    """
    check_shapes(query_BHTD, key_BGSD, value_BGSD, causal)
    if similarity not in SIMILARITIES:
        raise ValueError(f"unknown similarity {similarity!r}: choose {', '.join(SIMILARITIES)}")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"unknown normalization {normalization!r}: choose row-sum or none")
    if (similarity == "mlp") != (mlp is not None):
        raise ValueError(f"pass mlp if and only if the similarity is 'mlp', got {similarity!r}")
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


@dataclass(frozen=True)
class _Options:
    similarity: str
    denominator: str  # "none", "sum" or "clamped": 1, the row's sum, max(|the row's sum|, 1)
    scale: float
    causal: bool
    window: int | None


class _Similarity(torch.autograd.Function):
    """Chunked attention that saves its inputs, its output and one number per row."""

    @staticmethod
    @_uncast
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_BGRTD, key_BG1SD, value_BG1SD = grouped(query_BHTD, key_BGSD, value_BGSD)
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
    @_uncast
    def backward(
        ctx: Any, grad_out_BHTD: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        query_BHTD, key_BGSD, value_BGSD, out_BHTD, sum_BHT = ctx.saved_tensors
        options: _Options = ctx.options
        query_BGRTD, key_BG1SD, value_BG1SD = grouped(query_BHTD, key_BGSD, value_BGSD)
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
            grad_key_BGSD[..., keys, :] += sum_over_group(
                grad_scores_BGRCK, query_BGRTD[..., rows, :]
            )
            grad_value_BGSD[..., keys, :] += sum_over_group(weights_BGRCK, grad_out_BGRCD)
        return (
            grad_query_BHTD,
            grad_key_BGSD.to(key_BGSD.dtype),
            grad_value_BGSD.to(value_BGSD.dtype),
            None,
        )


@_uncast
def feature_map(x: Tensor, similarity: str, mlp: tuple[Tensor, Tensor] | None) -> Tensor:
    """Apply phi of P2.30 to queries or keys [..., D]; the identity for most similarities.

    Args:
        mlp: The two [D, D] weights, for "mlp".
    """
    if similarity not in ("elu-kernel", "mlp"):
        return x
    x = x.to(statistics_dtype(x.dtype))
    if mlp is None:
        # Equals elu(x) + 1, which would round exp(x) below 1e-7 to 0.
        return x.clamp(max=0.0).exp() + F.relu(x)
    first_DD, second_DD = (weight.to(x.dtype) for weight in mlp)
    return F.linear(F.relu(F.linear(x, first_DD)), second_DD)


def _weights(scores: Tensor, similarity: str) -> Tensor:
    """Return w(z) as a new tensor."""
    if similarity == "sigmoid":
        return scores.sigmoid()
    if similarity == "elu-plus-one":
        return scores.clamp(max=0.0).exp_().add_(F.relu(scores))
    return scores.clone()


def _derivative(scores: Tensor, weights: Tensor, similarity: str) -> Tensor | float:
    """Return dw/dz."""
    if similarity == "sigmoid":
        return torch.addcmul(weights, weights, weights, value=-1.0)
    if similarity == "elu-plus-one":
        return scores.clamp(max=0.0).exp_()
    return 1.0


def _denominator(row_sum: Tensor, kind: str) -> Tensor:
    if kind == "none":
        return torch.ones_like(row_sum)
    return row_sum + PROXY_EPSILON if kind == "sum" else row_sum.abs().clamp_min(1.0)


def _first_weight(weights_BGRCK: Tensor, keys: slice) -> Tensor:
    """Return |w_i0| / sum_j |w_ij|, [B, G, R, C]."""
    if keys.start > 0:
        return torch.zeros_like(weights_BGRCK[..., 0])
    row_sum_BGRC = torch.linalg.vector_norm(weights_BGRCK, ord=1, dim=-1)
    return weights_BGRCK[..., 0].abs() / (row_sum_BGRC + PROXY_EPSILON)


def _chunks(
    query_BHTD: Tensor, key_BGSD: Tensor, options: _Options
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (rows, keys visible to any of them, mask [C, K] of the hidden keys)."""
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    position_S = torch.arange(keys, device=key_BGSD.device)
    for rows, seen in row_chunks(queries, keys, options.causal, options.window):
        hidden_CK = torch.zeros((1, 1), dtype=torch.bool, device=key_BGSD.device)
        if options.causal:
            # The last of these keys belongs to the last of these rows.
            own_C = position_S[seen.stop - (rows.stop - rows.start) : seen.stop, None]
            distance_CK = own_C - position_S[seen]
            hidden_CK = distance_CK < 0
            if options.window is not None:
                hidden_CK |= distance_CK >= options.window
        yield rows, seen, hidden_CK


def _scores(
    query_BGRTD: Tensor, key_BG1SD: Tensor, rows: slice, keys: slice, scale: float
) -> Tensor:
    return products(query_BGRTD, key_BG1SD, rows, keys).mul_(scale)
