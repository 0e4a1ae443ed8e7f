"""The stand-in for TransformerEngine; see upstream_kernels.py."""

import torch

from tests.attention.upstream_kernels import (
    each_backward,
    each_forward,
    flash_backward,
    flash_forward,
    sink_gradient,
    whole_vectors,
)


class TransformerEngine:
    """2.20.2, transformer_engine/pytorch/cpp_extensions/fused_attn.py."""

    FusedAttnBackend = {"No_Backend": -1, "F16_arbitrary_seqlen": 1, "FP8": 2}  # noqa: RUF012

    # fmt: off
    @staticmethod
    def fused_attn_fwd(is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv,
                       q, k, v, fake_dtype, fused_attention_backend, attn_bias=None,
                       cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, page_table_k=None,
                       page_table_v=None, s_quantizer=None, o_quantizer=None, attn_scale=None,
                       dropout=0.0, fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
                       qkv_scale_inv_format=None, attn_bias_type="no_bias",
                       attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
                       bottom_right_diagonal=None, rng_gen=None, softmax_offset=None,
                       return_max_logit=False, cuda_graph=False):
        # fmt: on
        assert is_training
        causal, window = _engine_mask(attn_mask_type, window_size, qkv_layout, o_format, q, k)
        ends = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        _engine_inputs(q, k, v, ends, fused_attention_backend)
        assert fake_dtype is q.dtype
        assert dropout == 0.0
        offsets = [] if softmax_offset is None else [softmax_offset]
        sink_H = _engine_sink(softmax_type, offsets, q)
        if o_format == "thd":
            _engine_documents(ends, cu_seqlens_q_padded, cu_seqlens_kv_padded)
            out, lse = each_forward(q, k, v, ends, attn_scale, causal, window, sink_H)
            return out, [lse.t().contiguous()[..., None], torch.zeros(2).long(), *offsets]
        inputs = [tensor.permute(1, 2, 0, 3) for tensor in (q, k, v)]
        out, lse = flash_forward(*inputs, attn_scale, causal, window, sink_H)
        context = [lse[..., None], torch.zeros(2).long(), *offsets]
        return out.permute(2, 0, 1, 3).contiguous(), context

    # fmt: off
    @staticmethod
    def fused_attn_bwd(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o,
                       fake_dtype, aux_ctx_tensors, fused_attention_backend,
                       cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, s_quantizer=None,
                       dp_quantizer=None, dqkv_quantizer=None, attn_scale=None, dropout=0.0,
                       fast_zero_fill=True, qkv_layout="sbh3d", o_format="sbhd",
                       do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None,
                       do_scale_inv_format=None, attn_bias_type="no_bias",
                       attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1),
                       bottom_right_diagonal=None, deterministic=False, cuda_graph=False):
        # fmt: on
        causal, window = _engine_mask(attn_mask_type, window_size, qkv_layout, o_format, q, k)
        assert (do_format, dqkv_layout) == (o_format, qkv_layout)
        ends = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        _engine_inputs(q, k, v, ends, fused_attention_backend)
        assert o.is_contiguous()
        assert d_o.is_contiguous()
        whole_vectors(o, d_o)
        stats, state, *offsets = aux_ctx_tensors
        packed = o_format == "thd"
        rows = q.shape[:2] if packed else (q.shape[1], q.shape[2], q.shape[0])
        assert stats.shape == (*rows, 1)
        assert stats.is_contiguous()
        assert state.shape == (2,)
        assert state.dtype is torch.int64
        if packed:
            _engine_documents(ends, cu_seqlens_q_padded, cu_seqlens_kv_padded)
            lse = stats[..., 0].t()
            grads = each_backward(d_o, q, k, v, o, lse, ends, attn_scale, causal, window)
            sink_H, grad_sink = _engine_sink(softmax_type, offsets, q), None
            if sink_H is not None:
                grad_sink = sink_gradient(*(t[None].transpose(1, 2) for t in (d_o, o)), lse, sink_H)
                grad_sink = grad_sink[None, :, None, None]
            return [*grads, None, grad_sink]
        inputs = [tensor.permute(1, 2, 0, 3) for tensor in (d_o, q, k, v, o)]
        grads = flash_backward(*inputs, stats[..., 0], attn_scale, causal, window)
        sink_H, grad_sink = _engine_sink(softmax_type, offsets, q), None
        if sink_H is not None:
            d_out, *_, out = inputs
            grad_sink = sink_gradient(d_out, out, stats[..., 0], sink_H)[None, :, None, None]
        return [*(grad.permute(2, 0, 1, 3).contiguous() for grad in grads), None, grad_sink]


def _engine_mask(attn_mask_type, window_size, qkv_layout, o_format, q, k):
    """The causal mask, and the tokens visible or None."""
    assert qkv_layout == "_".join([o_format] * 3)
    masks = {
        "sbhd": {"causal": True, "causal_bottom_right": True, "no_mask": False},
        "thd": {"padding_causal_bottom_right": True},
    }
    causal = masks[o_format][attn_mask_type]
    if attn_mask_type == "causal":  # top left
        assert q.shape[0] == k.shape[0]
    assert not causal or q.shape[0] <= k.shape[0]
    left, right = window_size
    assert right == (0 if causal else -1)
    assert causal or left == -1
    return causal, None if left == -1 else left + 1


def _engine_sink(softmax_type, offsets, q):
    assert softmax_type == ("learnable" if offsets else "vanilla")
    for offset in offsets:
        assert offset.shape == (1, q.shape[-2], 1, 1)
        assert offset.dtype is torch.float32
        assert offset.is_contiguous()
        return offset.flatten()
    return None


def _engine_inputs(q, k, v, ends, backend):
    assert backend == TransformerEngine.FusedAttnBackend["F16_arbitrary_seqlen"]
    assert all(tensor.is_contiguous() for tensor in (q, k, v))
    whole_vectors(q, k, v)
    assert k.shape[0] > 1  # see CudnnKernel
    if q.dim() == 3:
        return
    assert ends[2:] == (q.shape[0], k.shape[0])
    for bounds, length in zip(ends[:2], ends[2:], strict=True):
        assert bounds.dtype is torch.int32
        assert bounds.tolist() == [length * row for row in range(q.shape[1] + 1)]


def _engine_documents(ends, padded_queries, padded_keys):
    """fused_attn_f16_arbitrary_seqlen.cu: these are the offsets of the rows."""
    for padded, bounds in zip((padded_queries, padded_keys), ends[:2], strict=True):
        assert torch.equal(padded, bounds)
        assert bounds.is_contiguous()
        assert bounds.data_ptr() % 16 == 0
