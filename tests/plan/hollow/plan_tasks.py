"""Tasks for the server of tests/plan/hollow: a rank of a plan."""

import sys
from types import ModuleType
from typing import Any

from megasink.plan import rank_step
from megasink.plan.hollow.lone_rank import be_rank
from megasink.training import parse_arguments
from megasink.training.checks import host_memory
from tests.attention import upstream_kernels


class _Written(BaseException):
    """The record is there, and the rank would end its process."""


def step(
    flags: list[str], number: int = 0, ranks: int = 1, package: str | None = None
) -> dict[str, Any]:
    """What `rank_step.step_as` records as rank `number` of `ranks`, with a stand-in package."""
    found: list[dict[str, Any]] = []
    if package is not None:
        _STAND_INS[package]()

    def write(record: dict[str, Any]) -> None:
        found.append(record)
        raise _Written

    try:
        rank_step.step_as(number, ranks, flags, write)
    except BaseException:
        if not found:
            raise
    return found[0]


def _apex() -> None:
    """Its GEMM, which writes nothing but what the weight's gradient has room for."""
    from megatron.core.tensor_parallel import layers

    from megasink.upstream import fused_kernels

    module = ModuleType(fused_kernels.APEX.module)
    module.wgrad_gemm_accum_fp32 = lambda *_: None  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    fused_kernels._reason.cache_clear()
    layers.fused_weight_gradient_mlp_cuda = module
    layers._grad_accum_fusion_available = True


def _flash_attention_2() -> None:
    from megasink.attention.kernels import backend_named

    names = vars(upstream_kernels.FlashAttention2)
    module = ModuleType(backend_named("flash-attn-2").module)
    vars(module).update({name: value for name, value in names.items() if name[:2] != "__"})
    for name in ("flash_attn", module.__name__):
        sys.modules[name] = module


_STAND_INS = {"apex": _apex, "flash-attn-2": _flash_attention_2}


def least_memory(flags: list[str], ranks: int) -> tuple[float, float]:
    """The bytes of a rank's state and activations by megasink.training.checks.host_memory."""
    be_rank(0, ranks)
    args, _ = parse_arguments.parse(flags)
    return host_memory.bytes_of_rank(args)
