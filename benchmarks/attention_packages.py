"""Packages of attention kernels whose functions return empty tensors, for attention_cost.py."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megasink.attention import documents
from megasink.attention.kernels import forget_choices, transformer_engine


class FlashAttention4:
    """Stands in for flash_attn.cute.interface."""

    @staticmethod
    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), _lse(q)

    @staticmethod
    def _flash_attn_bwd(
        *qkv: Tensor, learnable_sink: Tensor | None = None, **given: Any
    ) -> tuple[Tensor, ...]:
        names = zip(("dq", "dk", "dv"), qkv, strict=False)
        grads = tuple(given.get(name, torch.empty_like(like)) for name, like in names)
        return grads if learnable_sink is None else (*grads, torch.empty_like(learnable_sink))


class FlashAttention2:
    """Stands in for flash_attn.flash_attn_interface."""

    _flash_attn_forward = _flash_attn_varlen_forward = FlashAttention4._flash_attn_fwd

    @staticmethod
    def _flash_attn_backward(*_: Tensor, **options: Any) -> None:
        """Write into its arguments."""

    _flash_attn_varlen_backward = _flash_attn_backward


def _lse(query_BTHD: Tensor) -> Tensor:
    *batch, tokens, heads, _ = query_BTHD.shape
    return query_BTHD.new_empty(*batch, heads, tokens, dtype=torch.float32)


class TransformerEngine:
    """Stands in for transformer_engine.pytorch.cpp_extensions.fused_attn."""

    FusedAttnBackend = {"F16_arbitrary_seqlen": 1}  # noqa: RUF012

    @staticmethod
    def fused_attn_fwd(*, q: Tensor, **_: Any) -> tuple[Tensor, list[Tensor]]:
        packed = q.dim() == 3
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if packed else _lse(q.transpose(0, 1))
        return torch.empty_like(q), [lse[..., None]]

    @staticmethod
    def fused_attn_bwd(
        *, q: Tensor, k: Tensor, v: Tensor, aux_ctx_tensors: list[Tensor], **_: Any
    ) -> list[Tensor | None]:
        return [*map(torch.empty_like, (q, k, v)), None, torch.empty_like(aux_ctx_tensors[-1])]


PACKAGES = {
    "flash_attn.cute.interface": FlashAttention4,
    "flash_attn.flash_attn_interface": FlashAttention2,
    "transformer_engine.pytorch.cpp_extensions.fused_attn": TransformerEngine,
}


@contextmanager
def packages() -> Iterator[None]:
    """Within, the packages' kernels can be chosen."""
    names = {".".join(name.split(".")[:n]) for name in PACKAGES for n in range(1, 4)}
    stand_ins = {name: ModuleType(name) for name in names} | PACKAGES
    saved = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    caches = (transformer_engine._ends, *documents.CACHES)
    sys.modules.update(stand_ins)
    try:
        forget_choices()
        for cache in caches:
            cache.cache_clear()
        with (
            patch.object(torch.backends.cudnn, "version", lambda: 92600),
            patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(saved)
        forget_choices()
        for cache in caches:
            cache.cache_clear()
