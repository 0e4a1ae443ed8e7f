"""cuDNN's fused attention from TransformerEngine.

Follows 2.20.2, transformer_engine/pytorch/cpp_extensions/fused_attn.py, `fused_attn_fwd` and
`fused_attn_bwd`, and csrc/extensions/attention.cpp. Parameters change between releases, so calls
use keywords, and an incompatible release raises TypeError. `aux_ctx_tensors` is the natural LSE
[B, H, T, 1] in float32 and the RNG state, which only dropout reads.

Shapes: B batch, H query heads, T queries, S keys, D head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors
from megasink.attention.kernels.base import AttentionRequest
from megasink.attention.kernels.cuda import PackageBackend, with_whole_vectors
from megasink.attention.kernels.cudnn import CudnnKernel, cudnn_reason


class TransformerEngineBackend(CudnnKernel, PackageBackend):
    """For A100 and later, in Megatron's layout [s, b, h, d]; windows are built from blocks."""

    name = "transformer-engine"
    package = "transformer-engine[pytorch]"
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    largest_head_dim = 128

    def supports(self, request: AttentionRequest) -> str | None:
        if reason := super().supports(request) or cudnn_reason(request):
            return reason
        # attention/dot_product_attention/utils.py, get_attention_backend
        capability = request.compute_capability
        if request.deterministic and capability is not None and capability < (9, 0):
            return "before Hopper its backward is not deterministic"
        return None

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        """Make the tensor contiguous in [s, b, h, d]; free for Megatron's tensors."""
        return with_whole_vectors(tensor_BHTD.permute(2, 0, 1, 3).contiguous())

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.permute(1, 2, 0, 3)

    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        engine = self.load()
        out_TBHD, (stats_BHT1, *_) = engine.fused_attn_fwd(
            is_training=True, **self._shared(engine, query, key, value, call)
        )
        return out_TBHD, stats_BHT1.squeeze(-1)

    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        engine = self.load()
        grad_out, query, key, value, out, lse_BHT, _ = tensors
        no_state = torch.empty(2, dtype=torch.int64, device=query.device)
        grad_query, grad_key, grad_value, *_ = engine.fused_attn_bwd(
            o=out,
            d_o=grad_out,
            aux_ctx_tensors=[lse_BHT.contiguous().unsqueeze(-1), no_state],
            do_format="sbhd",
            dqkv_layout="sbhd_sbhd_sbhd",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._shared(engine, query, key, value, call),
        )
        return grad_query, grad_key, grad_value

    @staticmethod
    def _shared(
        engine: Any, query_TBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, call: AttentionCall
    ) -> dict[str, Any]:
        """Return the options common to forward and backward."""
        (queries, batch), keys = query_TBHD.shape[:2], key_SBGD.shape[0]

        def ends(length: int) -> Tensor:
            """Return 0, length, 2 length, ...: boundaries of equal-length, unpadded sequences."""
            last = batch * length + 1
            return torch.arange(0, last, length, dtype=torch.int32, device=query_TBHD.device)

        return {
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
            "cu_seqlens_q": ends(queries),
            "cu_seqlens_kv": ends(keys),
            "q": query_TBHD,
            "k": key_SBGD,
            "v": value_SBGD,
            "fake_dtype": query_TBHD.dtype,
            "fused_attention_backend": engine.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": call.scale,
            "dropout": 0.0,
            "qkv_layout": "sbhd_sbhd_sbhd",
            "o_format": "sbhd",
            "attn_bias_type": "no_bias",
            "attn_mask_type": "causal" if call.causal else "no_mask",
            "softmax_type": "vanilla",
            "window_size": (-1, 0) if call.causal else (-1, -1),
            "cuda_graph": query_TBHD.is_cuda and torch.cuda.is_current_stream_capturing(),
        }
