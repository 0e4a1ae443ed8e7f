"""PyTorch's CPU flash kernel.

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

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlashCpuBackend(Backend):
    """`aten::_scaled_dot_product_flash_attention_for_cpu`: any float dtype, any head dim, GQA."""

    name = "flash-cpu"

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        if request.device_type != "cpu":
            return f"it runs on the CPU, not on {request.device_type}"
        return fp16_reason(request)

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
        out_BHTD, lse_BHT = _forward(
            last_dim_dense(query_BHTD),
            last_dim_dense(key_BGSD),
            last_dim_dense(value_BGSD),
            0.0,
            causal,
            scale=scale,
        )
        return out_BHTD, lse_BHT

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
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = _backward(
            last_dim_dense(grad_out_BHTD),
            last_dim_dense(query_BHTD),
            last_dim_dense(key_BGSD),
            last_dim_dense(value_BGSD),
            last_dim_dense(out_BHTD),
            lse_BHT,
            0.0,
            causal,
            scale=scale,
        )
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD
