"""PyTorch's CPU flash kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors
from megasink.attention.kernels.backend import AttentionRequest, VendorBackend, fp16_reason

_forward = torch._scaled_dot_product_flash_attention_for_cpu  # 4 us less than through torch.ops
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlashCpuBackend(VendorBackend):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: any float dtype, any head dim, GQA."""

    name = "flash-cpu"

    def supports(self, request: AttentionRequest) -> str | None:
        if request.device_type != "cpu":
            return f"it runs on the CPU, not on {request.device_type}"
        return fp16_reason(request)

    def launch_forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out_BHTD, lse_BHT = _forward(
            query_BHTD, key_BGSD, value_BGSD, 0.0, call.causal, scale=call.scale
        )
        return out_BHTD, lse_BHT

    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        *inputs, lse_BHT, _, _ = tensors
        grads: Sequence[Tensor] = _backward(*inputs, lse_BHT, 0.0, call.causal, scale=call.scale)
        return grads
