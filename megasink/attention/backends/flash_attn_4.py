"""FlashAttention 4 of the package flash-attn-4, written in CuTe.

Read: the wheel 4.0.0b36, flash_attn/cute/interface.py, `_flash_attn_fwd` and `_flash_attn_bwd`.
The LSE is [B, H, T], natural, float32, and the backward takes its gradient as `dlse`, so nothing is
injected and float16 trains too. Its own learnable sink is not used: the slot is outside the kernel
on every backend, and gives the gate.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.backends.base import AttentionRequest, check_block
from megasink.attention.backends.cuda import PackageBackend
from megasink.attention.backends.flash_attn_2 import bthd


class FlashAttention4Backend(PackageBackend):
    """Hopper and later; sliding window, GQA and the gradient of the LSE included."""

    name = "flash-attn-4"
    package = "flash-attn-4"
    module = "flash_attn.cute.interface"
    capability = (9, 0)
    native_window = True
    takes_lse_gradient = True

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        # Blackwell's backward at D 256 asserts that there is no dlse, and 136 to 248 do not exist.
        capability = request.compute_capability
        if capability is not None and capability >= (10, 0) and request.head_dim > 128:
            return f"beyond Hopper its head dim goes up to 128, got {request.head_dim}"
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
        out_BTHD, lse_BHT, *_ = self.load()._flash_attn_fwd(
            bthd(query_BHTD),
            bthd(key_BGSD),
            bthd(value_BGSD),
            softmax_scale=scale,
            causal=causal,
            window_size_left=None if window is None else window - 1,  # without the token itself
            window_size_right=None if window is None else 0,
            return_lse=True,
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
        grads_BTHD = self.load()._flash_attn_bwd(
            bthd(query_BHTD),
            bthd(key_BGSD),
            bthd(value_BGSD),
            bthd(out_BHTD),
            bthd(grad_out_BHTD),
            lse_BHT.contiguous(),
            softmax_scale=scale,
            causal=causal,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dlse=None if lse_grad_BHT is None else lse_grad_BHT.contiguous(),
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (g.transpose(1, 2) for g in grads_BTHD)
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD
