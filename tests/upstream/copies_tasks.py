"""Tasks for the workers: upstream's functions and those in their place, on the same tensors."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.upstream.patch_register import suspended


def rotations() -> dict[str, Any]:
    """{case: (with the patch, by upstream)}; each is (result, its strides, gradient)."""
    cases: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
        "whole": (8, torch.float32, {}),
        "whole, bf16": (8, torch.bfloat16, {"mscale": 1.3}),
        "whole, interleaved": (8, torch.float32, {"rotary_interleaved": True}),
        "half": (4, torch.float32, {}),
        "latent": (8, torch.float32, {"mla_rotary_interleaved": True}),
    }
    with suspended("always"):
        known = inspect.signature(rope_utils._apply_rotary_pos_emb_bshd).parameters
    if "inverse" in known:  # Megatron-Core 0.20
        cases["inverse"] = (8, torch.float32, {"inverse": True})
    return _both(
        lambda: {name: _rotated(n, dtype, **more) for name, (n, dtype, more) in cases.items()}
    )


def _rotated(channels: int, dtype: torch.dtype, **options: Any) -> tuple[Any, ...]:
    """Rotate the queries in a row of [q, k, v] heads [5, 2, 3, 24]."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(5, 2, 3, 24, generator=generator).to(dtype).requires_grad_()
    angles = torch.randn(5, 1, 1, channels, generator=generator)
    out = rope_utils._apply_rotary_pos_emb_bshd(mixed[..., :8], angles, **options)
    weight = torch.randn(out.shape, generator=generator)
    (grad,) = torch.autograd.grad((out * weight).sum(), mixed)
    return out.detach().float(), tuple(out.stride()), grad.float()


def clipped() -> dict[str, Any]:
    """{case: (with the patch, by upstream)}; gradients after clipping, by their norm."""
    return _both(lambda: {f"norm {norm}": _clipped(norm) for norm in (0.5, 3.7)})


def _clipped(norm: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((7, 3), (5,), (2, 2, 2))]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    kept = [p.grad for p in params]  # views of the gradient buffer, which must change
    clip_grads.clip_grad_by_total_norm_fp32(params, 1.0, norm)
    return kept


def _both(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    mine = run()
    with suspended("always"):
        theirs = run()
    return {name: (mine[name], theirs[name]) for name in mine}


def saved() -> dict[str, int]:
    """{case: operations that upstream runs more}: copies, zeros and sums of whole tensors."""
    heads = torch.randn(5, 2, 3, 8, requires_grad=True)
    angles = torch.randn(5, 1, 1, 8)

    def count() -> dict[str, Any]:
        with _Counter() as forward:
            out = rope_utils._apply_rotary_pos_emb_bshd(heads, angles)
        with _Counter() as backward:
            torch.autograd.grad(out.sum(), heads)
        with _Counter() as clipping:
            _clipped(3.7)
        return {
            "rotated forward": forward.number,
            "rotated backward": backward.number,
            "clipped": clipping.number,
        }

    return {name: theirs - mine for name, (mine, theirs) in _both(count).items()}


class _Counter(TorchDispatchMode):
    """Counts copies, joins, zeros and sums."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ in ("copy_", "cat", "slice_backward", "add")
        return func(*args, **(kwargs or {}))
