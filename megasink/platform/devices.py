"""Tensors asked for on ``"cuda"`` are made on the CPU.

Megatron writes ``device="cuda"`` or ``device=torch.cuda.current_device()`` at each place where it
makes a tensor. The factories of torch are wrapped one by one (rather than by a TorchFunctionMode)
so that only those calls pay for it, in every thread.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megasink.platform.patching import replace

_CPU = torch.device("cpu")


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


def install() -> None:
    """Wrap the factories and the moves of torch."""
    # ``with torch.device("meta")`` knows factories by identity and looks them up once: it must find
    # the original ones, which the wrappers call. Else transformers leaves buffers uninitialised.
    _device_constructors()
    everywhere = 'device="cuda" throughout, e.g. megatron/training/training.py:1137'
    for name in ("arange", "empty", "empty_like", "ones", "rand", "tensor", "zeros"):
        replace(
            torch,
            name,
            _redirected(getattr(torch, name)),
            upstream=everywhere,
            reason="make it on the CPU",
        )
    moves = (
        "megatron/training/models/dist_utils.py; megatron/core/distributed/finalize_model_grads.py"
    )
    replace(torch.Tensor, "to", _moved(torch.Tensor.to), upstream=moves, reason="stay on the CPU")
    replace(torch.Tensor, "cuda", _stay, upstream=moves, reason="stay on the CPU")
    replace(
        torch.Tensor,
        "new_empty",
        _redirected(torch.Tensor.new_empty),
        upstream="megatron/core/tensor_parallel/mappings.py:444",
        reason="the tokens of experts are received on the CPU",
    )
    replace(
        torch.Tensor,
        "type",
        _type_name(torch.Tensor.type),
        upstream="megatron/core/optimizer/clip_grads.py:174; optimizer.py:1009",
        reason="it asserts or branches on 'torch.cuda.FloatTensor'",
    )
