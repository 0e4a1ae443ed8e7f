"""The registry of attention kernels and the selection among them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megasink.attention.call import VARIANTS
from megasink.attention.kernels.aten_cpu import FlashCpuBackend
from megasink.attention.kernels.backend import AttentionRequest, Backend, not_on_cuda
from megasink.errors import ConfigError

__all__ = ["AttentionRequest", "Backend", "Choice", "backend_named", "backend_names"]
__all__ += ["choose_backend", "forget_choices", "register_backend", "remembered"]

_CHOICES: list[Any] = []


def remembered[Choosing: Callable[..., Any]](choose: Choosing) -> Choosing:
    """Cache a choice of kernels until `forget_choices`."""
    cached: Any = lru_cache(maxsize=256)(choose)
    _CHOICES.append(cached)
    return cached


def forget_choices() -> None:
    """Choose kernels anew: the registry or what kernels support has changed."""
    for cached in _CHOICES:
        cached.cache_clear()


@dataclass(frozen=True)
class LaterBackend:
    """A backend that is imported when a request may need it."""

    name: str  # Name of the backend
    place: str  # module:class, the module in this package
    # Whether it runs every request on every device; else it is for CUDA devices.
    runs_anything: bool = False


_REGISTRY: dict[str, Backend | LaterBackend] = {}


@dataclass(frozen=True)
class Choice:
    """The selected backend, and why each other one was not selected."""

    name: str
    reasons: dict[str, str]  # name of another backend -> a clause

    def __str__(self) -> str:
        others = "; ".join(f"not {name}: {why}" for name, why in self.reasons.items())
        return f"{self.name} ({others})"


def register_backend(backend: Backend | LaterBackend, *, before: str | None = None) -> None:
    """Register a backend, ahead of `before` in the order in which "auto" tries them."""
    items = [item for item in _REGISTRY.items() if item[0] != backend.name]
    names = [name for name, _ in items]
    items.insert(len(items) if before is None else names.index(before), (backend.name, backend))
    _REGISTRY.clear()
    _REGISTRY.update(items)
    forget_choices()


def backend_names() -> tuple[str, ...]:
    """Return every registered backend, in the order in which "auto" tries them."""
    return tuple(_REGISTRY)


def backend_named(name: str) -> Backend:
    """Return the backend with this name."""
    backend = _REGISTRY[name]
    if isinstance(backend, LaterBackend):
        module, kind = backend.place.split(":")
        loaded: Backend = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
        _REGISTRY[name] = backend = loaded
    return backend


@remembered
def choose_backend(request: AttentionRequest, requested: str = "auto") -> Choice:
    """Select the backend for a request.

    It needs no tensor and no device, so a configuration can be rejected before anything is built.
    `requested` is "auto" for the first suitable backend, or the name of a required one; a "+" and
    the name of gate kernels may follow (`gate_kernels.choose_gate_kernels`). Raise ConfigError if
    none, or not the requested one, computes the request exactly.
    """
    requested = requested.partition("+")[0]
    problems = _problems_of_any_backend(request)
    if requested != "auto" and requested not in _REGISTRY:
        problems.append(
            f"unknown attention backend {requested!r}: choose auto, {', '.join(_REGISTRY)}"
        )
    if problems:
        raise ConfigError(problems)
    refusals = {name: _refusal(name, request) for name in _REGISTRY}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if not able:
        lines = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        raise ConfigError([f"no attention backend can run {_describe(request)}: {lines}"])
    if requested != "auto" and requested not in able:
        raise ConfigError(
            [
                f"attention backend {requested!r} cannot run {_describe(request)}: "
                f"{refusals[requested]}; use {able[0]!r}"
            ]
        )
    name = able[0] if requested == "auto" else requested
    idle = f"{name} comes first" if requested == "auto" else f"{name} was requested"
    reasons = {other: refusal or idle for other, refusal in refusals.items() if other != name}
    return Choice(name, reasons)


def _refusal(name: str, request: AttentionRequest) -> str | None:
    registered = _REGISTRY[name]
    if isinstance(registered, LaterBackend):
        if registered.runs_anything:
            return None
        if reason := not_on_cuda(request):
            return reason
    backend = backend_named(name)
    if request.distance_bias and not backend.takes_distance_bias:
        return "it does not support a distance bias"
    return backend.supports(request)


def _problems_of_any_backend(request: AttentionRequest) -> list[str]:
    """Return the problems that rule out every backend."""
    problems = []
    if request.variant not in VARIANTS:
        problems.append(
            f"unknown attention variant {request.variant!r}: choose {', '.join(VARIANTS)}"
        )
    if request.dropout:
        problems.append(
            f"attention dropout {request.dropout} breaks the identity between gate and LSE "
            "(paper P0.9): set attention dropout to 0"
        )
    if not request.dtype.is_floating_point or request.dtype.itemsize < 2:
        problems.append(
            f"attention dtype {request.dtype}: use float16, bfloat16, float32 or float64"
        )
    if request.window is not None and request.window < 1:
        problems.append(f"attention window {request.window}: use 1 (the token itself) or more")
    if request.window is not None and not request.causal:
        problems.append("an attention window needs the causal mask")
    if request.distance_bias and not request.causal:
        problems.append("a distance bias needs the causal mask")
    return problems


def _describe(request: AttentionRequest) -> str:
    bias = " with a distance bias" if request.distance_bias else ""
    gradient = " with a gradient through the gate" if request.needs_gate_gradient else ""
    narrow = request.value_dim not in (None, request.head_dim)
    values = f", of values {request.value_dim}" if narrow else ""
    return (
        f"{request.variant} attention in {request.dtype} on {request.device_type}, "
        f"head dim {request.head_dim}{values}{bias}{gradient}"
    )


# The order in which "auto" tries them: the newest FlashAttention that is installed and supported by
# the device, PyTorch's own, cuDNN, and eager, which runs anything.
for _backend in (
    FlashCpuBackend(),
    LaterBackend("flash-attn-4", "flash_attention:FlashAttention4Backend"),
    LaterBackend("flash-attn-3", "flash_attention:FlashAttention3Backend"),
    LaterBackend("flash-attn-2", "flash_attention:FlashAttention2Backend"),
    LaterBackend("flash-cuda", "aten_cuda:FlashCudaBackend"),
    LaterBackend("transformer-engine", "transformer_engine:TransformerEngineBackend"),
    LaterBackend("cudnn", "aten_cuda:CudnnBackend"),
    LaterBackend("eager", "eager:EagerBackend", runs_anything=True),
):
    register_backend(_backend)
