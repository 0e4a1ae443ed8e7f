"""Fused kernels of optional packages, which Megatron's defaults take for granted.

On a CUDA machine a default that needs a package which does not import is turned off, and the run
says so in one line; a flag that asks for it is refused.
"""

import functools
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasink.options.megatron_flags import refused

if TYPE_CHECKING:
    from megasink.attention import Choice


@dataclass(frozen=True)
class Package:
    """An optional package with fused kernels."""

    # name, module: what to install, and the module with the kernels.
    name: str
    module: str
    cure: str  # how to install it

    def missing(self) -> str | None:
        """Return why it cannot be used, or None. Imports it: a binary may be for another torch."""
        package = self.module.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            return f"the package {self.name} is not installed"
        return _reason(self.module, self.name)


@functools.cache
def _reason(module: str, name: str) -> str | None:
    from megasink.attention.kernels.cuda import package_reason

    return package_reason(module, name)


def broken(name: str, error: Exception) -> str:
    """Return which version of a package is installed, and why it cannot be imported."""
    from megasink.attention.kernels import cuda

    return cuda.broken(name, error)


TRANSFORMER_ENGINE = Package(
    "transformer-engine", "transformer_engine.pytorch", "pip install 'megasink[gpu]'"
)
# By published figures it reaches half again the speed of FlashAttention 2 on an H100.
FLASH_ATTENTION_4 = Package(
    "flash-attn-4", "flash_attn.cute.interface", "pip install 'flash-attn-4[cu13]>=4.0.0b30'"
)
APEX = Package(
    "apex",
    "fused_weight_gradient_mlp_cuda",
    "build github.com/NVIDIA/apex, as docker/Dockerfile does",
)


@dataclass(frozen=True)
class Default:
    """A default of Megatron's that needs a package."""

    name: str  # the argument
    without: Any  # its value if the package is missing
    package: Package
    kernels: str  # what is not used then, for the log


DEFAULTS = (
    Default("transformer_impl", "local", TRANSFORMER_ENGINE, "TransformerEngine's layers"),
    Default("apply_rope_fusion", False, TRANSFORMER_ENGINE, "fused RoPE"),
    # TransformerEngine's layers have it, but the output layer is Megatron's own.
    Default("gradient_accumulation_fusion", False, APEX, "weight gradients added by the GEMM"),
)
# What asks for a package -> the package.
_ASKED = {"without TransformerEngine": TRANSFORMER_ENGINE, "without apex": APEX}


def defaults() -> dict[str, Any]:
    """Return {argument: value} for Megatron's defaults that cannot be used here."""
    return {d.name: d.without for d in DEFAULTS if d.package.missing() is not None}


def describe() -> str:
    """Return one line for the log that names the fused kernels that are not used, and why."""
    absent: dict[str, list[str]] = {}
    for default in DEFAULTS:
        if (reason := default.package.missing()) is not None:
            absent.setdefault(reason, []).append(default.kernels)
    if not absent:
        return "fused kernels: Megatron's defaults"
    without = "; ".join(f"no {' and no '.join(names)}: {why}" for why, names in absent.items())
    return f"fused kernels: {without}"


def faster(choice: "Choice") -> str | None:
    """Return one line for a missing kernel that would be faster on this GPU, with its command."""
    name, cure = FLASH_ATTENTION_4.name, FLASH_ATTENTION_4.cure
    # Neither broken, which is reported apart, nor unsupported by the device.
    if choice.reasons.get(name) != f"the package {name} is not installed":
        return None
    return f"{name} should be faster here than {choice.name}, but is not installed: {cure}"


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per flag that asks for a package that cannot be used here."""
    for when, package in _ASKED.items():
        for flag, value, _ in refused(args, when):
            if (reason := package.missing()) is not None:
                flag = flag if value is True else f"{flag} {value}"
                yield f"{flag}: {reason}; {package.cure}, or drop the flag"
    local = args.transformer_impl not in (None, "transformer_engine")
    if (
        args.layernorm_zero_centered_gamma
        # None: the default, which is TransformerEngine's where it can be used.
        and (local or (args.transformer_impl is None and TRANSFORMER_ENGINE.missing() is not None))
        and (args.normalization == "RMSNorm" or APEX.missing() is not None)
    ):
        yield (
            "--apply-layernorm-1p: torch's norms have no zero-centered weight; drop the flag, or "
            f"use --transformer-impl transformer_engine ({TRANSFORMER_ENGINE.cure})"
        )
