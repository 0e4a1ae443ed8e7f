"""Stand-ins for CUDA packages: upstream's parameter lists, computed as the flash kernels do.

They see what the packages would see, so layouts, names and the way the gradient of the LSE enters
are proven on a CPU; what the real kernels then compute is for tests/gpu. Each checks what its
kernel takes for granted and does not check itself.

Shapes: B batch, T queries, S keys, H query heads, G groups, D head dim, R heads per group.
"""

import torch
from torch import Tensor

from megasink.attention.reference import _Mask, _scores


def flash_forward(q_BHTD, k_BGSD, v_BGSD, scale, causal, window, sink_H=None):
    """out in the dtype of q, and the natural LSE in float32, both with the sink if there is one."""
    wide = (tensor.float() for tensor in (q_BHTD, k_BGSD, v_BGSD))
    scores_BHTS, value_BHSD = _scores(*wide, _Mask(scale, causal, 0, window, None))
    lse_BHT = scores_BHTS.logsumexp(-1)
    if sink_H is not None:
        lse_BHT = torch.logaddexp(lse_BHT, sink_H[:, None])
    weights_BHTS = (scores_BHTS - lse_BHT[..., None]).exp()
    return (weights_BHTS @ value_BHSD).to(q_BHTD.dtype), lse_BHT


def sink_gradient(dout_BHTD, out_BHTD, lse_BHT, sink_H, dlse=None):
    """dsink = -sum p (dO . O - dlse), p = exp(sink - lse)."""
    delta_BHT = (dout_BHTD.float() * out_BHTD.float()).sum(-1) - (0.0 if dlse is None else dlse)
    return -((sink_H[:, None] - lse_BHT).exp() * delta_BHT).sum((0, 2))


def flash_backward(dout, q, k, v, out, lse, scale, causal, window, dlse=None):
    """dS = P (dO . v - delta), delta = dO . out - dlse, P from the LSE that is handed in."""
    dtype, groups = q.dtype, k.shape[1]
    dout, q, k, v, out = (tensor.float() for tensor in (dout, q, k, v, out))
    scores_BHTS, value_BHSD = _scores(q, k, v, _Mask(scale, causal, 0, window, None))
    weights_BHTS = (scores_BHTS - lse[..., None]).exp()
    delta_BHT = (dout * out).sum(-1) - (0.0 if dlse is None else dlse)
    grads_BHTS = weights_BHTS * (dout @ value_BHSD.transpose(-1, -2) - delta_BHT[..., None])
    grads_BHTS = grads_BHTS * scale
    key_BHSD = k.repeat_interleave(q.shape[1] // groups, dim=1)

    def of_groups(grad_BHSD: Tensor) -> Tensor:
        return grad_BHSD.unflatten(1, (groups, -1)).sum(2).to(dtype)

    return (
        (grads_BHTS @ key_BHSD).to(dtype),
        of_groups(grads_BHTS.transpose(-1, -2) @ q),
        of_groups(weights_BHTS.transpose(-1, -2) @ dout),
    )


NONE = (None, None, None, None)  # no boundaries of documents


def _documents(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """(first query, end, first key, end) of documents that have queries and cover the pack."""
    bounds = []
    for tensor, ends, longest in (
        (q, cu_seqlens_q, max_seqlen_q),
        (k, cu_seqlens_k, max_seqlen_k),
    ):
        assert ends.dtype is torch.int32
        assert ends.is_contiguous()
        assert ends[0] == 0
        assert ends[-1] == tensor.shape[0]
        assert ends.diff().min() > 0
        assert ends.diff().max() == longest
        bounds += [ends[:-1].tolist(), ends[1:].tolist()]
    return list(zip(*bounds, strict=True))


def each_forward(q, k, v, ends, *options):
    """`flash_forward` of [T, H, D], document by document; None for `ends` is one batch."""
    if ends[0] is None:
        out, lse = flash_forward(*_from_bthd(q, k, v), *options)
        return out.transpose(1, 2).contiguous(), lse
    outs, lses = [], []
    for a, b, c, d in _documents(q, k, *ends):
        inputs = _from_bthd(q[None, a:b], k[None, c:d], v[None, c:d])
        out, lse = flash_forward(*inputs, *options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def each_backward(dout, q, k, v, out, lse, ends, *options, dlse=None):
    """`flash_backward` likewise, with gradients in the layout of the inputs."""
    if ends[0] is None:
        grads = flash_backward(*_from_bthd(dout, q, k, v, out), lse, *options, dlse)
        return [grad.transpose(1, 2).contiguous() for grad in grads]
    whole = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    for a, b, c, d in _documents(q, k, *ends):
        rows = _from_bthd(dout[None, a:b], q[None, a:b], k[None, c:d], v[None, c:d], out[None, a:b])
        of_lse = None if dlse is None else dlse[None, :, a:b]
        grads = flash_backward(*rows, lse[None, :, a:b], *options, of_lse)
        for into, (first, last), grad in zip(whole, ((a, b), (c, d), (c, d)), grads, strict=True):
            into[first:last] = grad[0].transpose(0, 1)
    return whole


def _window(left, right, causal, everything):
    """Tokens visible, from sizes without the token itself."""
    if left == everything:
        assert right == everything
        return None
    assert causal
    assert right == 0
    return left + 1


def _dense(q, lse, *tensors):
    *batch, tokens, heads, _ = q.shape
    assert all(tensor.stride(-1) == 1 for tensor in (q, *tensors))
    whole_vectors(q, *tensors)
    if lse is not None:
        assert lse.shape == (*batch, heads, tokens)
        assert lse.is_contiguous()
        assert lse.dtype is torch.float32


def whole_vectors(*tensors):
    """They load 16 bytes at once: each row has to start at a multiple of that, unchecked."""
    for tensor in tensors:
        assert tensor.data_ptr() % 16 == 0
        steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        assert all(n == 1 or step * tensor.element_size() % 16 == 0 for n, step in steps)


def _from_bthd(*tensors):
    return [tensor.transpose(1, 2) for tensor in tensors]


class FlashAttention2:
    """v2.8.3, flash_attn/flash_attn_interface.py."""

    # fmt: off
    @staticmethod
    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left,
                            window_size_right, softcap, alibi_slopes, return_softmax, *, ends=NONE):
        # fmt: on
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        _dense(q, None, k, v)
        window = _window(window_size_left, window_size_right, causal, -1)
        out, lse = each_forward(q, k, v, ends, softmax_scale, causal, window)
        return out, lse, torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                   **options):
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return FlashAttention2._flash_attn_forward(q, k, v, ends=ends, **options)

    @staticmethod
    def _flash_attn_varlen_backward(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                    max_seqlen_k, **options):
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return FlashAttention2._flash_attn_backward(*tensors, ends=ends, **options)

    # fmt: off
    @staticmethod
    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p,
                             softmax_scale, causal, window_size_left, window_size_right, softcap,
                             alibi_slopes, deterministic, rng_state=None, *, ends=NONE):
        # fmt: on
        assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        _dense(q, softmax_lse, dout, k, v, out, dq, dk, dv)
        window = _window(window_size_left, window_size_right, causal, -1)
        inputs = (dout, q, k, v, out, softmax_lse)
        grads = each_backward(*inputs, ends, softmax_scale, causal, window)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)


class FlashAttention3:
    """3.0.0, hopper/flash_attn_interface.py."""

    # fmt: off
    @staticmethod
    def _flash_attn_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None,
                            cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
                            seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
                            kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                            seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
                            softmax_scale=None, causal=False, window_size_left=-1,
                            window_size_right=-1, attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
                            pack_gqa=None, sm_margin=0):
        # fmt: on
        _dense(q, None, k, v)
        window = _window(window_size_left, window_size_right, causal, -1)
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = each_forward(q, k, v, ends, softmax_scale, causal, window)
        return out, lse, torch.empty(0), torch.empty(0)

    # fmt: off
    @staticmethod
    def _flash_attn_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None,
                             sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None,
                             dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                             window_size_left=-1, window_size_right=-1, softcap=0.0,
                             deterministic=False, sm_margin=0):
        # fmt: on
        _dense(q, softmax_lse, dout, k, v, out, dq, dk, dv)
        window = _window(window_size_left, window_size_right, is_causal, -1)
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        inputs = (dout, q, k, v, out, softmax_lse)
        grads = each_backward(*inputs, ends, softmax_scale, is_causal, window)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)


class FlashAttention4:
    """The wheel 4.0.0b36, flash_attn/cute/interface.py."""

    # fmt: off
    @staticmethod
    def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
                        seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
                        page_table=None, softmax_scale=None, causal=False, softcap=None,
                        window_size_left=None, window_size_right=None, learnable_sink=None,
                        tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384,
                        num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
                        block_sparse_tensors=None, return_lse=False, out=None, lse=None,
                        aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None,
                        v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
                        seqlen_k_per_split=None, disable_scheduler_metadata=False,
                        gather_bwd_recompute_p=False):
        # fmt: on
        window = _window(window_size_left, window_size_right, causal, None)
        _sink_of_heads(learnable_sink, q)
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse = each_forward(q, k, v, ends, softmax_scale, causal, window, learnable_sink)
        return out, lse if return_lse else None, None, None, None

    # fmt: off
    @staticmethod
    def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
                        window_size_left=None, window_size_right=None, m_block_size=64,
                        n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
                        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
                        AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False,
                        cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
                        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None,
                        dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None,
                        aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
                        learnable_sink=None):
        # fmt: on
        _dense(q, lse, k, v, out, dout)
        if dlse is not None:
            _dense(q, dlse)
        window = _window(window_size_left, window_size_right, causal, None)
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = (softmax_scale, causal, window)
        grads = tuple(each_backward(dout, q, k, v, out, lse, ends, *options, dlse=dlse))
        if dq is not None:
            _dense(dq, None, dk, dv)
            grads = tuple(t.copy_(grad) for t, grad in zip((dq, dk, dv), grads, strict=True))
        if learnable_sink is None:
            return grads
        _sink_of_heads(learnable_sink, q)
        if cu_seqlens_q is not None:  # one batch of rows
            dout, out, lse = dout[None], out[None], lse[None]
            dlse = None if dlse is None else dlse[None]
        dout, out = _from_bthd(dout, out)
        return *grads, sink_gradient(dout, out, lse, learnable_sink, dlse)


def _sink_of_heads(sink, q):
    if sink is not None:
        assert sink.shape == q.shape[-2:-1]
        assert sink.dtype is torch.float32
        assert sink.is_contiguous()
