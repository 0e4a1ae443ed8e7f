"""Avoid needless copies in each step of upstream's plain PyTorch code.

They are made where no fused kernel is in use: without TransformerEngine and apex, as on a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch

from megasink.upstream.patch_register import patches

_patch = patches("always", "tests/upstream/test_copies.py")

CLIPPING = _patch(
    "gradients clipped in place",
    "megatron.core.optimizer.clip_grads",
    "multi_tensor_scale_impl",
    "every gradient would be multiplied into a new tensor and copied back",
    ": multi_tensor_scale_impl = local_multi_tensor_scale",
    ":clip_grad_by_total_norm_fp32: "
    "multi_tensor_applier(multi_tensor_scale_impl, dummy_overflow_buf, [grads, grads], clip_coeff)",
    "megatron.core.utils: def local_multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)",
    "megatron.core.utils:local_multi_tensor_scale: dst.copy_(src * scale)",
)
ROTATION = _patch(
    "rotation of whole heads",
    "megatron.core.models.common.embeddings.rope_utils",
    "_apply_rotary_pos_emb_bshd",
    "the channels that are not rotated are appended even if there are none: queries and keys are "
    "copied once more, and zeros of their size are added to their gradients",
    "def _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, "
    "*_)",
    ":_apply_rotary_pos_emb_bshd: cos_ = (torch.cos(freqs) * mscale).to(t.dtype)",
    ":_apply_rotary_pos_emb_bshd: sin_ = (torch.sin(freqs) * mscale).to(t.dtype)",
    ":_apply_rotary_pos_emb_bshd: t = (t * cos_) + (_rotate_half(t, rotary_interleaved) * sin_)",
    ":_apply_rotary_pos_emb_bshd: torch.cat((t, t_pass), dim=-1)",
    "def _rotate_half(x, rotary_interleaved)",
)


def apply() -> None:
    """Apply the patches."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.multi_tensor_scale_impl.__name__ == "local_multi_tensor_scale":
        CLIPPING.apply(multi_tensor_scale_impl=_scale)
    rotate = _rotating_whole_heads(rope_utils._apply_rotary_pos_emb_bshd, rope_utils._rotate_half)
    ROTATION.apply(_apply_rotary_pos_emb_bshd=rotate)


def _scale(chunk_size: int, noop_flag: Any, tensor_lists: Any, scale: float) -> None:
    """Scale the tensors in place, for gradient clipping."""
    torch._foreach_mul_(tensor_lists[1], scale)


def _rotating_whole_heads(
    upstream: Callable[..., Any], rotate_half: Callable[..., Any]
) -> Callable[..., Any]:
    """Return upstream's function for [S, ..., D] heads with a case for D rotated channels."""

    def rotate(
        t: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        *more: Any,
        **options: Any,
    ) -> Any:
        # What releases add is upstream's: 0.20 has `inverse`, and takes one more axis in `freqs`.
        plain = freqs.dim() == t.dim() and not (mla_rotary_interleaved or any(more))
        if not plain or any(options.values()) or freqs.shape[-1] != t.shape[-1]:
            given = (rotary_interleaved, mla_rotary_interleaved, mscale, *more)
            return upstream(t, freqs, *given, **options)
        cos = (torch.cos(freqs) * mscale).to(t.dtype)
        sin = (torch.sin(freqs) * mscale).to(t.dtype)
        return t * cos + rotate_half(t, rotary_interleaved) * sin

    return rotate
