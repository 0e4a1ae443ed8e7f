"""PyTorch's CUDA flash kernels: FlashAttention 2 and cuDNN.

Shapes: B batch, T tokens, H heads, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors
from megasink.attention.documents import Ends
from megasink.attention.kernels.backend import AttentionRequest, fp16_reason
from megasink.attention.kernels.cuda import BTHDLayout, cuda_reason, with_whole_vectors
from megasink.attention.kernels.cudnn import CudnnKernel, cudnn_reason


class FlashCudaBackend(BTHDLayout):
    """`aten::_flash_attention_forward`: FlashAttention 2, sliding window and GQA included."""

    name = "flash-cuda"
    native_window = True

    def supports(self, request: AttentionRequest) -> str | None:
        return cuda_reason(request, largest_head_dim=256) or fp16_reason(request)

    def launch_rows(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, packed: Ends | None
    ) -> tuple[Tensor, Tensor]:
        lengths = packed or (None, None, query.shape[1], key.shape[1])
        out_BTHD, lse_BHT, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *lengths, 0.0, call.causal, False, **_options(call)
        )
        return out_BTHD, lse_BHT

    def launch_rows_backward(
        self, tensors: BackwardTensors, call: AttentionCall, packed: Ends | None
    ) -> Sequence[Tensor]:
        *inputs, lse_BHT, _, _ = tensors
        _, query, key, *_ = inputs
        lengths = packed or (None, None, query.shape[1], key.shape[1])
        # The kernel reads the RNG state only with dropout.
        no_state = torch.empty(0, dtype=torch.uint64, device=query.device)
        grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
            *inputs,
            lse_BHT.contiguous(),  # the kernel ignores its strides
            *lengths,
            0.0,
            call.causal,
            no_state,
            no_state,
            **_options(call),
        )
        return grads


def _options(call: AttentionCall) -> dict[str, Any]:
    if call.window is None:
        return {"scale": call.scale}
    # aten counts the tokens to the left, excluding the token itself.
    window = {"window_size_left": call.window - 1, "window_size_right": 0}
    return {"scale": call.scale, **window}


class CudnnBackend(CudnnKernel):
    """`aten::_scaled_dot_product_cudnn_attention`: cuDNN's fused kernels.

    Every tensor is made contiguous as [B, H, T, D]: in some releases PyTorch's cache of cuDNN
    graphs is keyed only on the strides of query, key and value, and would silently reuse a graph
    built for another layout of the output or its gradient.
    """

    name = "cudnn"

    def supports(self, request: AttentionRequest) -> str | None:
        if reason := cudnn_reason(request):
            return reason
        if request.deterministic:  # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
            return "PyTorch cannot request cuDNN's deterministic backward"
        return cuda_reason(request, largest_head_dim=128) or fp16_reason(request)

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        return with_whole_vectors(tensor_BHTD.contiguous())

    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out_BHTD, stats, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, call.causal, False, scale=call.scale
        )
        return out_BHTD, stats.reshape(out_BHTD.shape[:3])

    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        *inputs, lse_BHT, _, _ = tensors
        _, query, key, *_ = inputs
        no_state = torch.empty((), dtype=torch.int64, device=query.device)
        no_bias, no_cumulative_lengths = None, (None, None)
        grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *inputs,
            lse_BHT.contiguous().unsqueeze(-1),
            no_state,
            no_state,
            no_bias,
            *no_cumulative_lengths,
            query.shape[2],
            key.shape[2],
            0.0,
            call.causal,
            scale=call.scale,
        )
        return grads
