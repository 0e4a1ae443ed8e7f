"""Task for the workers: the way of a query from core attention to the kernel."""

import sys
from types import FrameType
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType

from megasink.attention.call import AttentionCall
from megasink.attention.kernels.aten_cpu import FlashCpuBackend
from megasink.attention.variants import variants
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.core_attention import CoreAttention

LAST = FlashCpuBackend.launch_forward.__code__


def ways() -> dict[str, Any]:
    """The way of each variant, with the loss: (file, function, names of the query) by frame."""
    return {record.name: _way(record.name) for record in variants()}


def _way(variant: str) -> dict[str, Any]:
    config = MegasinkTransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        attention_variant=variant,
        head_balance_coeff=0.1,
        transformer_impl="local",
    )
    core = CoreAttention(config, 1, AttnMaskType.causal, "self")
    config.statistics.set_loss_scale(torch.ones(1))
    query, key, value = (torch.randn(9, 2, 4, 16, requires_grad=True) for _ in range(3))
    memory = query.untyped_storage().data_ptr()
    frames: list[tuple[str, str, list[str]]] = []
    packed = [0]

    def names(frame: FrameType) -> list[str]:
        tensors = {n: t for n, t in frame.f_locals.items() if isinstance(t, torch.Tensor)}
        return [n for n, t in tensors.items() if t.untyped_storage().data_ptr() == memory]

    def watch(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or frame is None:
            return
        if frame.f_code is AttentionCall._make.__func__.__code__:  # type: ignore[attr-defined]
            # `_replace` calls it with a map of the fields.
            packed[0] += frame.f_locals["cls"] is AttentionCall and "map" not in repr(
                frame.f_locals
            )
        if frame.f_code is LAST and not frames:
            while frame is not None:
                place = frame.f_code.co_filename.rpartition("/megasink/")[2]
                if frame.f_globals["__name__"].startswith("megasink."):
                    frames.append((place, frame.f_code.co_qualname, names(frame)))
                if frame.f_code is CoreAttention.forward.__code__:
                    break
                frame = frame.f_back

    sys.setprofile(watch)
    try:
        core(query, key, value, None)
    finally:
        sys.setprofile(None)
    return {"frames": frames[::-1], "packed": packed[0]}
