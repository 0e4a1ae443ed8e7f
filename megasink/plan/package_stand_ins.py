"""Stand-ins on the hollow GPU for the packages of Mamba and gated delta-net layers.

Each has the parameters, the shapes and the inputs that its kernels keep for the backward pass.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megasink.megatron.hybrid_pattern import recurrent

_REARRANGED = {
    "l b d -> b l d": lambda x: x.transpose(0, 1),
    "b l d -> l b d": lambda x: x.transpose(0, 1),
    "d 1 w -> d w": lambda x: x.squeeze(1),
}


def _repeated(x: Tensor, _: str, g: int, n: int, r: int) -> Tensor:
    return x.unflatten(-1, (g, n)).repeat_interleave(r, -2).flatten(-2)


class _Kernel(torch.autograd.Function):
    """A kernel that keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, shape: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *map(torch.empty_like, ctx.saved_tensors)


class _GatedNorm(torch.nn.Module):
    def __init__(self, size: int, *, device: Any = None, dtype: Any = None, **_: Any):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        gate = () if z is None else (z,)
        return _Kernel.apply(x.shape, x, self.weight, *gate)


def _scan(projected: Tensor, weight: Tensor, bias: Tensor, dt: Tensor, A: Tensor, **_: Any) -> Any:
    width = projected.shape[-1] - len(weight) - len(dt)
    return _Kernel.apply((*projected.shape[:-1], width), projected, weight, bias, dt, A)


def _convolution(x: Tensor, weight: Tensor, **_: Any) -> Any:
    return _Kernel.apply(x.shape, x, weight), None


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> Any:
    return _Kernel.apply(v.shape, v, q, k, g, beta), None


_MODULES: dict[str, dict[str, Any]] = {
    "einops": {"rearrange": lambda x, how, **_: _REARRANGED[how](x), "repeat": _repeated},
    "causal_conv1d": {"causal_conv1d_fn": None},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": _GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": _scan,
        "mamba_split_conv1d_scan_combined": _scan,
    },
    "fla.modules.convolution": {"causal_conv1d": _convolution},
    "fla.modules.l2norm": {"l2norm": lambda x, **_: _Kernel.apply(x.shape, x)},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _delta_rule},
}
_ABSENT: set[str] = set()


def stand_in() -> None:
    """Make absent packages importable, before Megatron is imported."""
    roots = {name.partition(".")[0] for name in _MODULES}
    _ABSENT.update(root for root in roots if importlib.util.find_spec(root) is None)
    for name, contents in _MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1) if parts[0] in _ABSENT else ():
            module = sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            module.__path__ = []
        if parts[0] in _ABSENT:
            vars(sys.modules[name]).update(contents)


def notes(pattern: str | None) -> Iterator[str]:
    """Yield a line for a model whose layers have stand-ins."""
    if _ABSENT and (kinds := recurrent(pattern or "")):
        yield (
            f"planned {' and '.join(kinds)} layers without kernels ({', '.join(sorted(_ABSENT))}): "
            "their memory includes the saved inputs, but no workspace"
        )
