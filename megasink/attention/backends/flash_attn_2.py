"""FlashAttention 2 of the package flash-attn.

Read: v2.8.3, flash_attn/flash_attn_interface.py, `_flash_attn_forward` and `_flash_attn_backward`,
whose parameters are the same since v2.7.0. The LSE is [B, H, T], natural, float32. Its gradient is
dropped by upstream's autograd function, without a word; here it enters by injection.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.backends.base import check_block, last_dim_dense
from megasink.attention.backends.cuda import PackageBackend


def bthd(tensor_BHTD: Tensor) -> Tensor:
    """The view that the FlashAttention packages take; their last dimension must be dense."""
    return last_dim_dense(tensor_BHTD).transpose(1, 2)


class FlashAttention2Backend(PackageBackend):
    """A100 and later; sliding window and GQA included."""

    name = "flash-attn-2"
    package = "flash-attn"
    module = "flash_attn.flash_attn_interface"
    native_window = True

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
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1 if window is None else window - 1,  # without the token itself
            window_size_right=-1 if window is None else 0,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
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
            *grads_BTHD,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (g.transpose(1, 2) for g in grads_BTHD)
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD
