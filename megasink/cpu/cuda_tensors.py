"""Create tensors requested on ``"cuda"`` on the CPU.

Megatron passes ``device="cuda"`` or ``device=torch.cuda.current_device()`` wherever it creates a
tensor. torch's factories are wrapped one by one, not with a TorchFunctionMode, so that only those
calls pay for it, in every thread.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from megasink.cpu import patches

_CPU = torch.device("cpu")

# Every torch function that creates a tensor on a given device; tests/cpu compares the list
# with torch's schemas.
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
    """Return the device to use instead of ``device``, which may be another argument of ``.to``."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _redirected(function: Any, place: int | None = None) -> Callable[..., Any]:
    """Wrap a function with a ``device``, which may also be the positional argument at `place`."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if place is not None and len(args) > place:
            args = (*args[:place], _to_cpu(args[place]), *args[place + 1 :])
        return function(*args, **kwargs)

    return wrapper


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
    """Return a torch.Generator that accepts a CUDA device."""
    original = torch.Generator

    class AnyGenerator(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    class Generator(original, metaclass=AnyGenerator):  # type: ignore[valid-type, misc]
        def __new__(cls, device: Any = _CPU) -> Any:
            return original(_to_cpu(device))

    # Pickle as torch.Generator: a process without this platform may read the file.
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    return Generator


def install() -> None:
    """Wrap torch's tensor factories and device moves."""
    # ``with torch.device("meta")`` looks factories up by identity, once: it must find the
    # originals, which the wrappers call. Otherwise transformers leaves buffers uninitialized.
    _device_constructors()
    for owner in dict.fromkeys(owner for owner, _ in FACTORIES):
        names = [name for other, name in FACTORIES if other is owner]
        patches.FACTORIES.apply(
            owner, **{name: _redirected(getattr(owner, name)) for name in names}
        )
    patches.GENERATOR.apply(Generator=_generator())
    patches.CONTEXT.apply(__init__=_redirected(DeviceContext.__init__, 1))
    patches.MOVES.apply(to=_redirected(torch.Tensor.to, 1), cuda=lambda self, *args, **kwargs: self)
    patches.TENSOR_TYPE.apply(type=_type_name(torch.Tensor.type))
