"""PyTorch's CUDA flash kernels: FlashAttention 2 and cuDNN.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

import torch
from torch import Tensor

from megasink.attention.backends.base import (
    AttentionRequest,
    Backend,
    check_block,
    fp16_reason,
    last_dim_dense,
)
from megasink.attention.backends.cuda import cuda_reason


class FlashCudaBackend(Backend):
    """`aten::_flash_attention_forward`: FlashAttention 2, sliding window and GQA included."""

    name = "flash-cuda"
    native_window = True

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        return cuda_reason(request, largest_head_dim=256) or fp16_reason(request)

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
        out_BTHD, lse_BHT, *_ = torch.ops.aten._flash_attention_forward(
            *(last_dim_dense(t).transpose(1, 2) for t in (query_BHTD, key_BGSD, value_BGSD)),
            None,
            None,
            query_BHTD.shape[2],
            key_BGSD.shape[2],
            0.0,
            causal,
            False,
            scale=scale,
            **_window_arguments(window),
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
        # The kernel reads the state of the random number generator only under dropout.
        no_state = torch.empty(0, dtype=torch.uint64, device=query_BHTD.device)
        grads_BTHD = torch.ops.aten._flash_attention_backward(
            *(last_dim_dense(tensor).transpose(1, 2) for tensor in inputs),
            lse_BHT.contiguous(),  # read through its pointer, as dense
            None,
            None,
            query_BHTD.shape[2],
            key_BGSD.shape[2],
            0.0,
            causal,
            no_state,
            no_state,
            scale=scale,
            **_window_arguments(window),
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (g.transpose(1, 2) for g in grads_BTHD)
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD


def _window_arguments(window: int | None) -> dict[str, int]:
    # aten counts the tokens to the left of a token, without the token itself.
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class CudnnBackend(Backend):
    """`aten::_scaled_dot_product_cudnn_attention`: cuDNN's fused kernels.

    Every tensor is made contiguous as [B, H, T, D]: PyTorch's cache of cuDNN graphs is keyed on
    the strides of query, key and value alone in some releases, and a graph that was built for
    another layout of the output or its gradient would be used without a word.
    """

    name = "cudnn"

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        if request.device_type == "cuda" and not torch.backends.cudnn.is_available():
            return "this PyTorch has no cuDNN"
        return cuda_reason(request, largest_head_dim=128) or fp16_reason(request)

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
        out_BHTD, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(tensor.contiguous() for tensor in (query_BHTD, key_BGSD, value_BGSD)),
            None,
            True,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out_BHTD, stats.reshape(out_BHTD.shape[:3])

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
        no_state = torch.empty((), dtype=torch.int64, device=query_BHTD.device)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(tensor.contiguous() for tensor in inputs),
            lse_BHT.contiguous().unsqueeze(-1),
            no_state,
            no_state,
            None,
            None,
            None,
            query_BHTD.shape[2],
            key_BGSD.shape[2],
            0.0,
            causal,
            scale=scale,
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = grads
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD
