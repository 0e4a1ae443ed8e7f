"""Attention in plain tensor operations, for the dtypes and devices that no flash kernel serves.

Rows of queries are taken a chunk at a time, and the backward computes the weights again, so the
largest temporary is [B, H, CHUNK, S]. fp16 and bf16 are computed in float32.

Shapes: B batch, H query heads, G groups, R heads per group, T queries, C a chunk of them, S keys,
D head dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megasink.attention.backends.base import AttentionRequest, Backend, check_block
from megasink.attention.backends.toeplitz import backward_toeplitz, forward_toeplitz

CHUNK = 256


class EagerBackend(Backend):
    """Any dtype and device; several times slower than a flash kernel."""

    name = "eager"
    takes_lse_gradient = True
    takes_distance_bias = True

    def supports(self, request: AttentionRequest) -> str | None:
        """Everything but attention dropout, under which no gate identity holds (paper P0.9)."""
        return None

    def forward(
        self,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_block(query_BHTD, key_BGSD, causal)
        query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
        out_BGRTD = torch.empty_like(query_BGRTD)
        lse_BGRT = query_BGRTD.new_empty(query_BGRTD.shape[:-1])
        for rows, keys in _chunks(query_BHTD.shape[2], key_BGSD.shape[2], causal):
            scores_BGRCS = _scores(query_BGRTD, key_BG1SD, rows, keys, causal, scale)
            lse_BGRC = scores_BGRCS.logsumexp(-1)
            lse_BGRT[..., rows] = lse_BGRC
            weights_BGRCS = scores_BGRCS.sub_(lse_BGRC[..., None]).exp_()
            out_BGRTD[..., rows, :] = weights_BGRCS @ value_BG1SD[..., keys, :]
        return out_BGRTD.flatten(1, 2).to(query_BHTD.dtype), lse_BGRT.flatten(1, 2)

    def backward(
        self,
        grad_out_BHTD: Tensor,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
        lse_grad_BHT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Backend.backward`."""
        check_block(query_BHTD, key_BGSD, causal)
        query_BGRTD, key_BG1SD, value_BG1SD = _grouped(query_BHTD, key_BGSD, value_BGSD)
        groups = key_BGSD.shape[1]
        grad_out_BGRTD = grad_out_BHTD.to(query_BGRTD.dtype).unflatten(1, (groups, -1))
        delta_BHT = (grad_out_BHTD.to(query_BGRTD.dtype) * out_BHTD).sum(-1)
        if lse_grad_BHT is not None:
            delta_BHT = delta_BHT - lse_grad_BHT
        delta_BGRT = delta_BHT.unflatten(1, (groups, -1))
        lse_BGRT = lse_BHT.unflatten(1, (groups, -1))

        grad_query_BGRTD = torch.empty_like(query_BGRTD)
        grad_key_BGSD = torch.zeros_like(key_BGSD, dtype=query_BGRTD.dtype)
        grad_value_BGSD = torch.zeros_like(value_BGSD, dtype=query_BGRTD.dtype)
        for rows, keys in _chunks(query_BHTD.shape[2], key_BGSD.shape[2], causal):
            scores_BGRCS = _scores(query_BGRTD, key_BG1SD, rows, keys, causal, scale)
            weights_BGRCS = scores_BGRCS.sub_(lse_BGRT[..., rows, None]).exp_()
            grad_out_BGRCD = grad_out_BGRTD[..., rows, :]
            grad_weights_BGRCS = grad_out_BGRCD @ value_BG1SD[..., keys, :].transpose(-1, -2)
            grad_scores_BGRCS = grad_weights_BGRCS.sub_(delta_BGRT[..., rows, None])
            grad_scores_BGRCS.mul_(weights_BGRCS).mul_(scale)
            grad_query_BGRTD[..., rows, :] = grad_scores_BGRCS @ key_BG1SD[..., keys, :]
            grad_key_BGSD[..., keys, :] += _sum_over_group(
                grad_scores_BGRCS, query_BGRTD[..., rows, :]
            )
            grad_value_BGSD[..., keys, :] += _sum_over_group(weights_BGRCS, grad_out_BGRCD)
        dtype = query_BHTD.dtype
        return (
            grad_query_BGRTD.flatten(1, 2).to(dtype),
            grad_key_BGSD.to(dtype),
            grad_value_BGSD.to(dtype),
        )

    def forward_biased(
        self,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        distance_bias_HS: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward_biased`."""
        return forward_toeplitz(
            query_BHTD, key_BGSD, value_BGSD, distance_bias_HS, scale=scale, window=window
        )

    def backward_biased(
        self,
        grad_out_BHTD: Tensor,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        distance_bias_HS: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        *,
        scale: float,
        window: int | None = None,
        lse_grad_BHT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Backend.backward_biased`."""
        return backward_toeplitz(
            grad_out_BHTD,
            query_BHTD,
            key_BGSD,
            value_BGSD,
            distance_bias_HS,
            out_BHTD,
            lse_BHT,
            scale=scale,
            window=window,
            lse_grad_BHT=lse_grad_BHT,
        )


def _grouped(query_BHTD: Tensor, *keys_BGSD: Tensor) -> tuple[Tensor, ...]:
    """Query as [B, G, R, T, D] and keys as [B, G, 1, S, D], float32 at least."""
    dtype = torch.promote_types(query_BHTD.dtype, torch.float32)
    query_BGRTD = query_BHTD.to(dtype).unflatten(1, (keys_BGSD[0].shape[1], -1))
    return query_BGRTD, *(tensor.to(dtype).unsqueeze(2) for tensor in keys_BGSD)


def _chunks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Slices of rows, each with the slice of keys that some row of it sees."""
    for start in range(0, queries, CHUNK):
        stop = min(start + CHUNK, queries)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _scores(
    query_BGRTD: Tensor, key_BG1SD: Tensor, rows: slice, keys: slice, causal: bool, scale: float
) -> Tensor:
    """z of one chunk of rows, -inf above the diagonal of a causal block."""
    scores_BGRCS = query_BGRTD[..., rows, :] @ key_BG1SD[..., keys, :].transpose(-1, -2)
    scores_BGRCS.mul_(scale)
    if causal:
        hidden_CS = torch.ones(
            scores_BGRCS.shape[-2:], dtype=torch.bool, device=scores_BGRCS.device
        ).triu(rows.start + 1)
        scores_BGRCS.masked_fill_(hidden_CS, -torch.inf)
    return scores_BGRCS


def _sum_over_group(weights_BGRCS: Tensor, rows_BGRCD: Tensor) -> Tensor:
    """sum over heads of the group and rows of weights_cs * row_cd, as [B, G, S, D]."""
    return weights_BGRCS.flatten(2, 3).transpose(-1, -2) @ rows_BGRCD.flatten(2, 3)
