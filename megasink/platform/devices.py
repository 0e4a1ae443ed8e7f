"""Tensors asked for on ``"cuda"`` are made on the CPU.

Megatron writes ``device="cuda"`` or ``device=torch.cuda.current_device()`` at each place where it
makes a tensor. The factories of torch are wrapped one by one (rather than by a TorchFunctionMode)
so that only those calls pay for it, in every thread.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from megasink.platform.patching import replace

_CPU = torch.device("cpu")

# Everything in torch that makes a tensor on a device that it is given; tests/platform compares the
# list with torch's own schemas.
_TORCH = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted
    empty_quantized empty_strided eye from_file full full_like hamming_window hann_window
    kaiser_window linspace logspace normal ones ones_like rand rand_like randint randint_like randn
    randn_like randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor
    sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor
    tril_indices triu_indices zeros zeros_like
"""
_OTHERS = ((torch.fft, "fftfreq rfftfreq"), (torch.nested, "nested_tensor as_nested_tensor"))
_NEW = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
FACTORIES: tuple[tuple[Any, str], ...] = tuple(
    (owner, name)
    for owner, names in ((torch, _TORCH), *_OTHERS, (torch.Tensor, _NEW))
    for name in names.split()
)


def _to_cpu(device: Any) -> Any:
    """The device to use where ``device`` was asked for."""
    if device is None or isinstance(device, torch.dtype | torch.Tensor):
        return device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _redirected(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """For ``.to``, whose device may be the first positional argument."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], int):
            args = (_to_cpu(args[0]), *args[1:])
        elif args:
            args = (_CPU, *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return function(self, *args, **kwargs)

    return wrapper


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _generator() -> type[torch.Generator]:
    """torch.Generator, whose device may be CUDA."""
    original = torch.Generator

    class AnyGenerator(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    class Generator(original, metaclass=AnyGenerator):  # type: ignore[valid-type, misc]
        def __new__(cls, device: Any = _CPU) -> Any:
            return original(_to_cpu(device))

    # So are those in files, which another process reads without this one.
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    return Generator


def _context(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, device: Any) -> None:
        original(self, _to_cpu(device))

    return __init__


def install() -> None:
    """Wrap the factories and the moves of torch."""
    # ``with torch.device("meta")`` knows factories by identity and looks them up once: it must find
    # the original ones, which the wrappers call. Else transformers leaves buffers uninitialised.
    _device_constructors()
    everywhere = 'device="cuda" throughout, e.g. megatron/training/training.py:1137'
    for owner, name in FACTORIES:
        wrapper = _redirected(getattr(owner, name))
        replace(owner, name, wrapper, upstream=everywhere, reason="make it on the CPU")
    replace(
        torch,
        "Generator",
        _generator(),
        upstream="megatron/core/inference/text_generation_controllers/"
        "text_generation_controller.py:251",
        reason="it draws numbers for tensors on the CPU",
    )
    replace(
        DeviceContext,
        "__init__",
        _context(DeviceContext.__init__),
        upstream="torch/utils/_device.py: with torch.device(...) and torch.set_default_device",
        reason="what is made without a device is on the CPU there, too",
    )
    moves = (
        "megatron/training/models/dist_utils.py; megatron/core/distributed/finalize_model_grads.py"
    )
    replace(torch.Tensor, "to", _moved(torch.Tensor.to), upstream=moves, reason="stay on the CPU")
    replace(torch.Tensor, "cuda", _stay, upstream=moves, reason="stay on the CPU")
    replace(
        torch.Tensor,
        "type",
        _type_name(torch.Tensor.type),
        upstream="megatron/core/optimizer/clip_grads.py:174; optimizer.py:1009",
        reason="it asserts or branches on 'torch.cuda.FloatTensor'",
    )
