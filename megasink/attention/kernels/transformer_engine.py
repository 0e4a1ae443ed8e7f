"""cuDNN's fused attention from TransformerEngine.

Follows 2.20.2, transformer_engine/pytorch/cpp_extensions/fused_attn.py, `fused_attn_fwd` and
`fused_attn_bwd`, and csrc/extensions/attention.cpp. Parameters change between releases, so calls
use keywords, and a release without them is refused. `aux_ctx_tensors` is the natural LSE
[B, H, T, 1] in float32 (of packed documents [T, H, 1]), the RNG state, which only dropout reads,
and the sink [1, H, 1, 1].
The gradient of the sink is taken as dL/dsink, the sign that TransformerEngine documents; the graph
of cuDNN's front-end reads otherwise, and no GPU has run it here: tests/gpu compares it first.

Shapes: B batch, H query heads, T queries, S keys, D head dim.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors
from megasink.attention.documents import Ends, ends
from megasink.attention.kernels.backend import AttentionRequest, compute_capability
from megasink.attention.kernels.cuda import PackageBackend, with_whole_vectors
from megasink.attention.kernels.cudnn import (
    PACKED_SINK_SINCE,
    CudnnKernel,
    cudnn_reason,
    cudnn_version,
)

# torch.backends.cudnn.version() of the first release with a window, with a mask that is aligned
# bottom right for any number of tokens, and with a sink.
WINDOW_SINCE, BOTTOM_RIGHT_SINCE, SINK_SINCE = 90200, 90700, 91301


class TransformerEngineBackend(CudnnKernel, PackageBackend):
    """For A100 and later, in Megatron's layout [s, b, h, d], with sliding window and sink."""

    name = "transformer-engine"
    package = "transformer-engine[pytorch]"
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    native_window = True
    takes_sink = True
    keywords: ClassVar[dict[str, str]] = {
        "fused_attn_fwd": "softmax_type softmax_offset window_size fake_dtype cuda_graph",
        "fused_attn_bwd": "softmax_type window_size fake_dtype deterministic cuda_graph",
    }
    tested = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.20,<3'"

    def supports(self, request: AttentionRequest) -> str | None:
        if reason := super().supports(request) or cudnn_reason(request):
            return reason
        if request.window is not None and (version := cudnn_version()) < WINDOW_SINCE:
            return f"a window needs cuDNN 9.2 or later, but {version} is installed"
        # attention/dot_product_attention/utils.py, get_attention_backend
        capability = request.compute_capability
        if request.deterministic and capability is not None and capability < (9, 0):
            return "on GPUs before Hopper its backward pass is not deterministic"
        return None

    def largest_head_dim(self, request: AttentionRequest) -> int:
        return 256 if request.compute_capability == (9, 0) else 128

    def sink_reason(self, request: AttentionRequest) -> str | None:
        if (version := cudnn_version()) < SINK_SINCE:
            return f"its sink needs cuDNN 9.13.1 or later, but {version} is installed"
        if request.deterministic:
            return "the gradient of its sink is not deterministic"
        return None

    @property
    def bottom_right(self) -> bool:  # type: ignore[override]
        return cudnn_version() >= BOTTOM_RIGHT_SINCE

    @property
    def packs(self) -> bool:  # type: ignore[override]
        # common/fused_attn/fused_attn.cpp, nvte_get_fused_attn_backend: THD from Hopper on. On
        # compute capability 12 the LSE of packed documents has another layout.
        capability = compute_capability(torch.device("cuda"))
        able = capability is None or capability[0] in (9, 10, 11)
        return able and cudnn_version() >= PACKED_SINK_SINCE

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        """Make the tensor contiguous in [s, b, h, d]; free for Megatron's tensors."""
        return with_whole_vectors(tensor_BHTD.permute(2, 0, 1, 3).contiguous())

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.permute(1, 2, 0, 3)

    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        engine = self.load()
        sink_H = call.sink_H
        out, (stats, *_) = engine.fused_attn_fwd(
            is_training=True,
            softmax_offset=None if sink_H is None else sink_H[None, :, None, None],
            **self._shared(engine, query, key, value, call),
        )
        if call.cu_seqlens is None:
            return out, stats.squeeze(-1)
        return out[:, None], stats.permute(2, 1, 0).contiguous()

    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        engine = self.load()
        grad_out, query, key, value, out, lse_BHT, _, _ = tensors
        packed = call.cu_seqlens is not None
        stats = lse_BHT.permute(2, 1, 0) if packed else lse_BHT.unsqueeze(-1)
        no_state = torch.empty(2, dtype=torch.int64, device=query.device)
        shared = self._shared(engine, query, key, value, call)
        sink = [] if call.sink_H is None else [call.sink_H[None, :, None, None]]
        *grads, _, grad_sink_1H11 = engine.fused_attn_bwd(
            o=out[:, 0] if packed else out,
            d_o=grad_out[:, 0] if packed else grad_out,
            aux_ctx_tensors=[stats.contiguous(), no_state, *sink],
            do_format=shared["o_format"],
            dqkv_layout=shared["qkv_layout"],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **shared,
        )
        if packed:
            grads = [grad[:, None] for grad in grads]
        return [*grads, grad_sink_1H11.flatten()] if sink else grads

    @staticmethod
    def _shared(
        engine: Any, query_TBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, call: AttentionCall
    ) -> dict[str, Any]:
        """Return the options common to forward and backward."""
        (queries, batch), keys = query_TBHD.shape[:2], key_SBGD.shape[0]
        left = -1 if call.window is None else call.window - 1  # excluding the token itself

        capturing = query_TBHD.is_cuda and torch.cuda.is_current_stream_capturing()
        rows: Sequence[Tensor] = (query_TBHD, key_SBGD, value_SBGD)
        if call.cu_seqlens is None:
            even = partial(
                _ends.__wrapped__ if capturing else _ends, batch=batch, device=query_TBHD.device
            )
            bounds, layout = Ends(even(queries), even(keys), queries, keys), "sbhd"
            aligned = "causal" if queries == keys else "causal_bottom_right"
            mask = aligned if call.causal else "no_mask"
        else:
            rows = [tensor[:, 0] for tensor in rows]
            bounds = ends(call.cu_seqlens, queries, query_TBHD.device)
            layout, mask = "thd", "padding_causal_bottom_right"
        cu_queries, cu_keys, longest_queries, longest_keys = bounds
        padded = {"cu_seqlens_q_padded": cu_queries, "cu_seqlens_kv_padded": cu_keys}
        return {
            "max_seqlen_q": longest_queries,
            "max_seqlen_kv": longest_keys,
            "cu_seqlens_q": cu_queries,
            "cu_seqlens_kv": cu_keys,
            **({} if call.cu_seqlens is None else padded),
            **dict(zip("qkv", rows, strict=True)),
            "fake_dtype": query_TBHD.dtype,
            "fused_attention_backend": engine.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": call.scale,
            "dropout": 0.0,
            "qkv_layout": "_".join([layout] * 3),
            "o_format": layout,
            "attn_bias_type": "no_bias",
            "attn_mask_type": mask,
            "softmax_type": "vanilla" if call.sink_H is None else "learnable",
            "window_size": (left, 0 if call.causal else -1),
            "cuda_graph": capturing,
        }


@lru_cache(maxsize=16)
def _ends(length: int, batch: int, device: torch.device) -> Tensor:
    """Return 0, length, 2 length, ...: boundaries of equal-length, unpadded sequences.

    Cached, but not while a CUDA graph is captured, whose memory is its own.
    """
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
