"""What third-party kernels are given: rows that do not start at multiples of 16 bytes."""

from typing import Any

from torch import Tensor

from megasink.attention.kernels import backend_named, backend_names
from megasink.attention.kernels.backend import VendorBackend


def watch_rows() -> set[str]:
    """Watch the kernels of this process from now on.

    Returns:
        a set that receives the kernel, the call, and the shape and strides of each such tensor: the
        host checks the last stride alone, and a GPU ends the run with "misaligned address".
    """
    misplaced: set[str] = set()
    for kind in {type(backend_named(name)) for name in backend_names()}:
        if issubclass(kind, VendorBackend):
            for name in ("launch_forward", "launch_backward"):
                setattr(kind, name, _watched(getattr(kind, name), name, misplaced))
    return misplaced


def _watched(inner: Any, name: str, misplaced: set[str]) -> Any:
    def launch(self: Any, *arguments: Any) -> Any:
        tensors = arguments[0] if name == "launch_backward" else arguments[:3]
        for tensor in tensors:
            if tensor is not None and tensor.dim() == 4 and not _starts_whole(tensor):
                shape, strides = tuple(tensor.shape), tensor.stride()
                misplaced.add(f"{self.name} {name}: {shape} by {strides}")
        return inner(self, *arguments)

    return launch


def _starts_whole(tensor: Tensor) -> bool:
    steps = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s != 1]
    places = [tensor.data_ptr(), *(step * tensor.element_size() for step in steps)]
    return not any(place % 16 for place in places)
