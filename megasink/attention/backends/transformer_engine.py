"""cuDNN's fused attention as TransformerEngine builds it.

Read: 2.20.2, transformer_engine/pytorch/cpp_extensions/fused_attn.py, `fused_attn_fwd` and
`fused_attn_bwd`, and csrc/extensions/attention.cpp. Called by keyword: the parameters have changed
between releases, and a release with others raises TypeError. `aux_ctx_tensors` is the LSE
[B, H, T, 1], natural, float32, and the state of the random number generator, which only dropout
reads.

Shapes: B batch, H query heads, G groups, T queries, S keys, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from megasink.attention.backends.base import check_block
from megasink.attention.backends.cuda import PackageBackend


class TransformerEngineBackend(PackageBackend):
    """A100 and later; tensors as Megatron's [s, b, h, d]; windows are made of blocks."""

    name = "transformer-engine"
    package = "transformer-engine[pytorch]"
    module = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    largest_head_dim = 128

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
        engine = self.load()
        out_TBHD, (stats_BHT1, *_) = engine.fused_attn_fwd(
            is_training=True,
            **self._arguments(engine, query_BHTD, key_BGSD, value_BGSD, causal, scale),
        )
        return out_TBHD.permute(1, 2, 0, 3), stats_BHT1.squeeze(-1)

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
        engine = self.load()
        no_state = torch.empty(2, dtype=torch.int64, device=query_BHTD.device)
        grads_TBHD = engine.fused_attn_bwd(
            o=_tbhd(out_BHTD),
            d_o=_tbhd(grad_out_BHTD),
            aux_ctx_tensors=[lse_BHT.contiguous().unsqueeze(-1), no_state],
            do_format="sbhd",
            dqkv_layout="sbhd_sbhd_sbhd",
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(engine, query_BHTD, key_BGSD, value_BGSD, causal, scale),
        )
        grad_query_BHTD, grad_key_BGSD, grad_value_BGSD = (
            grad.permute(1, 2, 0, 3) for grad in grads_TBHD[:3]
        )
        return grad_query_BHTD, grad_key_BGSD, grad_value_BGSD

    @staticmethod
    def _arguments(
        engine: Any,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        causal: bool,
        scale: float,
    ) -> dict[str, Any]:
        """What both calls take."""
        batch, _, queries, _ = query_BHTD.shape
        keys = key_BGSD.shape[2]

        def ends(length: int) -> Tensor:
            """0, length, 2 length, ...: sequences of one length, without padding."""
            last = batch * length + 1
            return torch.arange(0, last, length, dtype=torch.int32, device=query_BHTD.device)

        return {
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
            "cu_seqlens_q": ends(queries),
            "cu_seqlens_kv": ends(keys),
            "q": _tbhd(query_BHTD),
            "k": _tbhd(key_BGSD),
            "v": _tbhd(value_BGSD),
            "fake_dtype": query_BHTD.dtype,
            "fused_attention_backend": engine.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": "sbhd_sbhd_sbhd",
            "o_format": "sbhd",
            "attn_bias_type": "no_bias",
            "attn_mask_type": "causal" if causal else "no_mask",
            "softmax_type": "vanilla",
            "window_size": (-1, 0) if causal else (-1, -1),
            "cuda_graph": query_BHTD.is_cuda and torch.cuda.is_current_stream_capturing(),
        }


def _tbhd(tensor_BHTD: Tensor) -> Tensor:
    """Contiguous: the kernel is told the layout, not the strides. Free for Megatron's tensors."""
    return tensor_BHTD.permute(2, 0, 1, 3).contiguous()
