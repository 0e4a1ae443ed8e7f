"""Attention in plain tensor operations, for dtypes and devices without a flash kernel.

Query rows are processed in chunks and the backward recomputes the weights, so the largest temporary
is [B, H, CHUNK, S]. fp16 and bf16 are computed in float32.

Shapes: B batch, H query heads, G groups, R heads per group, T queries, C queries of a chunk,
S keys, K keys visible to the chunk, D head dim, X distances (see toeplitz.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.kernels.backend import AttentionRequest, Backend, check_block
from megasink.attention.row_chunks import CHUNK, grouped, products, row_chunks, sum_over_group


class EagerBackend(Backend):
    """Any dtype and device; several times slower than a flash kernel."""

    name = "eager"
    takes_lse_gradient = True
    takes_distance_bias = True

    def supports(self, request: AttentionRequest) -> str | None:
        """Accept everything; dropout, which breaks the gate identity (P0.9), is checked before."""
        return None

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        query_BGRTD, key_BG1SD, value_BG1SD = grouped(query_BHTD, key_BGSD, value_BGSD)
        bias_GRX = _bias(query_BHTD, key_BGSD, call)
        out_BGRTD = query_BGRTD.new_empty(*query_BGRTD.shape[:-1], value_BGSD.shape[-1])
        lse_BGRT = query_BGRTD.new_empty(query_BGRTD.shape[:-1])
        for rows, keys in _chunks(query_BHTD, key_BGSD, call):
            scores_BGRCK = _scores(query_BGRTD, key_BG1SD, rows, keys, call, bias_GRX)
            lse_BGRC = scores_BGRCK.logsumexp(-1)
            lse_BGRT[..., rows] = lse_BGRC
            weights_BGRCK = scores_BGRCK.sub_(lse_BGRC[..., None]).exp_()
            out_BGRTD[..., rows, :] = weights_BGRCK @ value_BG1SD[..., keys, :]
        return out_BGRTD.flatten(1, 2).to(query_BHTD.dtype), lse_BGRT.flatten(1, 2)

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        grad_out_BHTD, query_BHTD, key_BGSD, value_BGSD, out_BHTD, lse_BHT, *_ = tensors
        lse_grad_BHT = tensors.lse_grad_BHT
        query_BGRTD, key_BG1SD, value_BG1SD = grouped(query_BHTD, key_BGSD, value_BGSD)
        bias_GRX = _bias(query_BHTD, key_BGSD, call)
        groups, past = key_BGSD.shape[1], key_BGSD.shape[2] - query_BHTD.shape[2]
        grad_out_BGRTD = grad_out_BHTD.to(query_BGRTD.dtype).unflatten(1, (groups, -1))
        delta_BHT = (grad_out_BHTD.to(query_BGRTD.dtype) * out_BHTD).sum(-1)
        if lse_grad_BHT is not None:
            delta_BHT = delta_BHT - lse_grad_BHT
        delta_BGRT = delta_BHT.unflatten(1, (groups, -1))
        lse_BGRT = lse_BHT.unflatten(1, (groups, -1))

        grad_query_BGRTD = torch.empty_like(query_BGRTD)
        grad_key_BGSD = torch.zeros_like(key_BGSD, dtype=query_BGRTD.dtype)
        grad_value_BGSD = torch.zeros_like(value_BGSD, dtype=query_BGRTD.dtype)
        grad_bias_GRX = None if bias_GRX is None else torch.zeros_like(bias_GRX)
        for rows, keys in _chunks(query_BHTD, key_BGSD, call):
            scores_BGRCK = _scores(query_BGRTD, key_BG1SD, rows, keys, call, bias_GRX)
            weights_BGRCK = scores_BGRCK.sub_(lse_BGRT[..., rows, None]).exp_()
            grad_out_BGRCD = grad_out_BGRTD[..., rows, :]
            grad_weights_BGRCK = grad_out_BGRCD @ value_BG1SD[..., keys, :].transpose(-1, -2)
            grad_scores_BGRCK = grad_weights_BGRCK.sub_(delta_BGRT[..., rows, None])
            grad_scores_BGRCK.mul_(weights_BGRCK)
            if grad_bias_GRX is not None:
                from megasink.attention.kernels.toeplitz import diagonal_sums, diagonals

                touched = diagonals(rows, keys, past, key_BGSD.shape[2])
                grad_bias_GRX[..., touched] += diagonal_sums(grad_scores_BGRCK.sum(0))
            grad_scores_BGRCK.mul_(call.scale)
            grad_query_BGRTD[..., rows, :] = grad_scores_BGRCK @ key_BG1SD[..., keys, :]
            grad_key_BGSD[..., keys, :] += sum_over_group(
                grad_scores_BGRCK, query_BGRTD[..., rows, :]
            )
            grad_value_BGSD[..., keys, :] += sum_over_group(weights_BGRCK, grad_out_BGRCD)
        grad_bias_HS = None
        if grad_bias_GRX is not None:
            grad_bias_HS = grad_bias_GRX.flatten(0, 1)[:, : key_BGSD.shape[2]].flip(-1)
        dtype = query_BHTD.dtype
        return Gradients(
            grad_query_BGRTD.flatten(1, 2).to(dtype),
            grad_key_BGSD.to(dtype),
            grad_value_BGSD.to(dtype),
            grad_bias_HS,
        )


def _bias(query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall) -> Tensor | None:
    """Return the distance bias as diagonals; without a bias, require square causal blocks."""
    if call.distance_bias_HS is None:
        check_block(query_BHTD, key_BGSD, call)
        return None
    from megasink.attention.kernels.toeplitz import reversed_bias

    return reversed_bias(call.distance_bias_HS, key_BGSD.shape[1], call.window, CHUNK)


def _chunks(
    query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall
) -> Iterator[tuple[slice, slice]]:
    return row_chunks(query_BHTD.shape[2], key_BGSD.shape[2], call.causal, call.window)


def _scores(
    query_BGRTD: Tensor,
    key_BG1SD: Tensor,
    rows: slice,
    keys: slice,
    call: AttentionCall,
    bias_GRX: Tensor | None,
) -> Tensor:
    """Return z for one chunk of rows, -inf where a key is hidden."""
    scores_BGRCK = products(query_BGRTD, key_BG1SD, rows, keys).mul_(call.scale)
    if bias_GRX is not None:
        from megasink.attention.kernels.toeplitz import as_matrix, diagonals

        total = key_BG1SD.shape[-2]
        touched = diagonals(rows, keys, total - query_BGRTD.shape[-2], total)
        return scores_BGRCK.add_(as_matrix(bias_GRX[..., touched], scores_BGRCK.shape[-1]))
    if call.causal:
        hidden_CK = torch.ones(
            scores_BGRCK.shape[-2:], dtype=torch.bool, device=scores_BGRCK.device
        ).triu(rows.start + 1)
        scores_BGRCK.masked_fill_(hidden_CK, -torch.inf)
    return scores_BGRCK
