"""Common requirements of CUDA kernels, and base classes for kernels from optional packages."""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.documents import Ends, ends
from megasink.attention.kernels.backend import (
    AttentionRequest,
    VendorBackend,
    compute_capability,
    fp16_reason,
    not_on_cuda,
)


def at_runtime(request: AttentionRequest, device_index: int | None) -> AttentionRequest:
    """Return the request with the facts of its CUDA device and PyTorch's settings."""
    device = (
        request.device_type if device_index is None else f"{request.device_type}:{device_index}"
    )
    return replace(
        request,
        compute_capability=compute_capability(torch.device(device)),
        deterministic=request.deterministic or torch.are_deterministic_algorithms_enabled(),
    )


def cuda_reason(
    request: AttentionRequest, largest_head_dim: int, capability: tuple[int, int] = (8, 0)
) -> str | None:
    """Return why a half-precision kernel (D % 8 == 0, from `capability` on) cannot run, or None."""
    if reason := not_on_cuda(request):
        return reason
    if request.compute_capability is not None and request.compute_capability < capability:
        needed, has = (".".join(map(str, c)) for c in (capability, request.compute_capability))
        return f"it needs compute capability {needed} or later, but the device has {has}"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not in {request.dtype}"
    if request.head_dim % 8 or request.head_dim > largest_head_dim:
        return (
            f"the head dim must be a multiple of 8 up to {largest_head_dim}, got {request.head_dim}"
        )
    return None


def package_reason(module: str, package: str) -> str | None:
    """Return why the module of `package` cannot be imported, or None."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"the package {package} is not installed"
        if BROKEN in str(error):  # it was reported
            return str(error)
        return broken(package, error)
    except Exception as error:  # a binary for another torch or driver may raise anything
        return broken(package, error)
    return None


BROKEN = " cannot be imported ("


def broken(package: str, error: Exception) -> str:
    """Return which version of a package is installed, and why it cannot be imported."""
    # The first line: a failed import of libraries lists every path that was tried.
    said = (str(error).splitlines() or [""])[0]
    name = distribution(package)
    return f"{name} {installed_version(name)}{BROKEN}{type(error).__name__}: {said})"


def distribution(package: str) -> str:
    """Return the name of a `PackageBackend.package` without its extras and source."""
    return package.partition(" ")[0].partition("[")[0]


def installed_version(package: str) -> str:
    """Return the version of a distribution, "(unknown version)" without its metadata."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton, CuTe and TransformerEngine launch there."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


_VECTOR_BYTES = 16


def with_whole_vectors(tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor, copied unless all its rows start at multiples of 16 bytes.

    CUDA kernels load 16 bytes at once. Their hosts check the last stride alone, so other rows end
    in "misaligned address" on the device.
    """
    elements = _VECTOR_BYTES // tensor_BHTD.element_size()
    rows = zip(tensor_BHTD.shape[:-1], tensor_BHTD.stride()[:-1], strict=True)
    if tensor_BHTD.data_ptr() % _VECTOR_BYTES or any(n > 1 and step % elements for n, step in rows):
        return tensor_BHTD.clone(memory_format=torch.contiguous_format)
    return tensor_BHTD


class BTHDLayout(VendorBackend):
    """FlashAttention's layout [B, T, H, D]: a view if the last dimension is dense and aligned.

    Packed documents are [T, H, D] and their statistics [H, T].
    """

    bottom_right = True
    packs = True

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        return with_whole_vectors(super().lay_out(tensor_BHTD)).transpose(1, 2)

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2)

    def lay_out_results(
        self, into: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        if into is None:
            return None
        query, key, value = map(self.lay_out, into)
        views = zip((query, key, value), into, strict=True)
        if any(view.data_ptr() != tensor.data_ptr() for view, tensor in views):
            return None
        return query, key, value

    @abstractmethod
    def launch_rows(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, packed: Ends | None
    ) -> tuple[Tensor, Tensor]:
        """Run `launch_forward`, on the rows of packed documents if they are given."""

    @abstractmethod
    def launch_rows_backward(
        self, tensors: BackwardTensors, call: AttentionCall, packed: Ends | None
    ) -> Sequence[Tensor]:
        """Run `launch_backward` likewise."""

    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        if call.cu_seqlens is None:
            return self.launch_rows(query, key, value, call, None)
        packed = ends(call.cu_seqlens, query.shape[1], query.device)
        out, lse = self.launch_rows(query[0], key[0], value[0], call, packed)
        return out[None], lse[None]

    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        if call.cu_seqlens is None:
            return self.launch_rows_backward(tensors, call, None)
        packed = ends(call.cu_seqlens, tensors.query_BHTD.shape[1], tensors.query_BHTD.device)
        *given, into = tensors
        rows: list[Any] = [None if tensor is None else tensor[0] for tensor in given]
        rows.append(None if into is None else [tensor[0] for tensor in into])
        grads = self.launch_rows_backward(BackwardTensors._make(rows), call, packed)
        return [*(into or (grad[None] for grad in grads[:3])), *grads[3:]]


class PackageBackend(VendorBackend):
    """A CUDA kernel from an optional package."""

    package: str  # Name for `pip install`, or the source
    module: str  # Module to import, on the first request that would run on it
    capability: tuple[int, int] = (8, 0)  # Lowest supported compute capability
    # Functions that are called, and keywords that releases before (or after) others lack.
    keywords: ClassVar[dict[str, str]] = {}
    tested: str  # for `pip install`: the releases that have them

    def largest_head_dim(self, request: AttentionRequest) -> int:
        """Return the largest head dim; D must be a multiple of 8."""
        return 256

    def supports(self, request: AttentionRequest) -> str | None:
        return (
            cuda_reason(request, self.largest_head_dim(request), self.capability)
            or (None if self.takes_lse_gradient else fp16_reason(request))
            or package_reason(self.module, self.package)
            or self._lacks()
        )

    def _lacks(self) -> str | None:
        """Return the reason if a function of this release would not take a call."""
        module = sys.modules.get(self.module)
        for name, keywords in self.keywords.items() if module else ():
            function = getattr(module, name, None)
            # torch.library.custom_op hides the parameters of the function that it wraps.
            inner = getattr(function, "_init_fn", function)
            takes = {} if inner is None else signature(inner).parameters
            open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in takes.values())
            absent = [k for k in keywords.split() if k not in takes and not open_ended]
            if absent:
                package = distribution(self.package)
                of = name if function is None else f"{name}({', '.join(absent)})"
                return f"{package} {installed_version(package)} has no {of}: {self.tested}"
        return None

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        with device_of(query_BHTD):
            return super().forward(query_BHTD, key_BGSD, value_BGSD, call)

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        with device_of(tensors.query_BHTD):
            return super().backward(tensors, call)

    def load(self) -> Any:
        """Import the module."""
        return import_module(self.module)
