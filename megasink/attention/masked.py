"""Run a kernel under any mask: in one call if it supports the mask, else in blocks.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.kernels.backend import Backend


def forward_masked(
    backend: Backend,
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor]:
    """Return out_BHTD in the dtype of the query, and lse_BHT, float32 (float64 for float64)."""
    alone = one_call(backend, query_BHTD.shape[2], key_BGSD.shape[2], call)
    if alone is not None:
        return backend.forward(query_BHTD, key_BGSD, value_BGSD, alone)
    from megasink.attention.mask_blocks import forward_blocks

    return forward_blocks(backend, query_BHTD, key_BGSD, value_BGSD, call)


def backward_masked(backend: Backend, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
    """Compute the gradients of `forward_masked`; see `Backend.backward`."""
    alone = one_call(backend, tensors.query_BHTD.shape[2], tensors.key_BGSD.shape[2], call)
    if alone is not None:
        return backend.backward(tensors, alone)
    from megasink.attention.mask_blocks import backward_blocks

    return backward_blocks(backend, tensors, call)


def one_call(
    backend: Backend, queries: int, keys: int, call: AttentionCall
) -> AttentionCall | None:
    """Return the call for the backend, or None if it lacks the mask."""
    if call.window is not None and call.window >= keys:
        call = call._replace(window=None)
    if call.cu_seqlens is not None:
        return call
    if not call.causal or call.distance_bias_HS is not None:
        return call
    if queries == 1 and call.window is None:  # sees every key
        return call._replace(causal=False, prefix=0)
    aligned = queries == keys or (backend.bottom_right and queries < keys)
    has_window = call.window is None or backend.native_window
    return call if aligned and has_window and not call.prefix else None
