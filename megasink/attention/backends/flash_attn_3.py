"""FlashAttention 3, for Hopper: the folder hopper/ of the flash-attention repository.

Read: 3.0.0 of August 2026, hopper/flash_attn_interface.py, `_flash_attn_forward` and
`_flash_attn_backward`. The LSE is [B, H, T], natural, float32. Its gradient is dropped by
upstream's autograd function, without a word; here it enters by injection.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.backends.base import AttentionRequest, check_block
from megasink.attention.backends.cuda import PackageBackend
from megasink.attention.backends.flash_attn_2 import bthd


class FlashAttention3Backend(PackageBackend):
    """Hopper alone; sliding window and GQA included."""

    name = "flash-attn-3"
    package = "flash_attn_3 (hopper/ of github.com/Dao-AILab/flash-attention)"
    module = "flash_attn_interface"
    capability = (9, 0)
    native_window = True

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        if request.compute_capability is not None and request.compute_capability >= (10, 0):
            return "it is written for Hopper, compute capability 9.0"
        return super().supports(request)

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
        out_BTHD, lse_BHT, *_ = self.load()._flash_attn_forward(
            bthd(query_BHTD),
            bthd(key_BGSD),
            bthd(value_BGSD),
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1 if window is None else window - 1,  # without the token itself
            window_size_right=-1 if window is None else 0,
        )
        return out_BTHD.transpose(1, 2), lse_BHT

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
        inputs = (grad_out_BHTD, query_BHTD, key_BGSD, value_BGSD, out_BHTD)
        tensors_BTHD = [bthd(tensor) for tensor in inputs]
        grads_BTHD = [torch.empty_like(tensor) for tensor in tensors_BTHD[1:4]]
        self.load()._flash_attn_backward(
            *tensors_BTHD,
            lse_BHT.contiguous(),
            dq=grads_BTHD[0],
            dk=grads_BTHD[1],
            dv=grads_BTHD[2],
            softmax_scale=scale,
            is_causal=causal,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (g.transpose(1, 2) for g in grads_BTHD)
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD
