"""What every CUDA kernel asks for, and kernels of packages, imported only where they would run."""

from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megasink.attention.backends.base import AttentionRequest, VendorBackend, fp16_reason


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None for another device, or where there is no driver to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


# Of the hardware, which does not change: asking costs as much as the launch of a small kernel.
_capability = lru_cache(torch.cuda.get_device_capability)


def cuda_reason(
    request: AttentionRequest, largest_head_dim: int, capability: tuple[int, int] = (8, 0)
) -> str | None:
    """Why a kernel of `capability` or later, half precision and D a multiple of 8, will not run."""
    if request.device_type != "cuda":
        return f"it runs on CUDA devices, not on {request.device_type}"
    if request.compute_capability is not None and request.compute_capability < capability:
        needed, found = (".".join(map(str, c)) for c in (capability, request.compute_capability))
        return f"it needs compute capability {needed} or later, the device has {found}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not in {request.dtype}"
    if request.head_dim % 8 or request.head_dim > largest_head_dim:
        return (
            f"the head dim must be a multiple of 8 up to {largest_head_dim}, got {request.head_dim}"
        )
    return None


def package_reason(module: str, package: str) -> str | None:
    """Why the module cannot be imported; `package` is what would bring it."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"the package {package} is not installed"
        return f"{package} does not import: {error}"
    except Exception as error:  # a binary built for another torch or driver raises what it likes
        return f"{package} does not import: {type(error).__name__}: {error}"
    return None


class BTHDLayout(VendorBackend):
    """FlashAttention's own layout: views, as long as the last dimension is dense."""

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        """See `VendorBackend`."""
        return super().lay_out(tensor_BHTD).transpose(1, 2)

    def read(self, tensor: Tensor) -> Tensor:
        """See `VendorBackend`."""
        return tensor.transpose(1, 2)


class PackageBackend(VendorBackend):
    """A CUDA kernel of a package that megasink does not depend on.

    Attributes:
        package: its name for `pip install`, or where it comes from.
        module: what is imported, on the first request that would run on it.
        capability: the lowest compute capability.
        largest_head_dim: D is a multiple of 8 up to this.
    """

    package: str
    module: str
    capability: tuple[int, int] = (8, 0)
    largest_head_dim: int = 256

    def supports(self, request: AttentionRequest) -> str | None:
        """See `Backend.supports`."""
        return (
            cuda_reason(request, self.largest_head_dim, self.capability)
            or (None if self.takes_lse_gradient else fp16_reason(request))
            or package_reason(self.module, self.package)
        )

    def load(self) -> Any:
        """The module."""
        return import_module(self.module)
