"""Limits of cuDNN's fused attention, for every package that calls it."""

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.kernels.backend import AttentionRequest, VendorBackend
from megasink.attention.kernels.eager import EagerBackend
from megasink.attention.masked import backward_masked, forward_masked

# torch.backends.cudnn.version() of the first release without that defect, and of the first whose
# gradient of sinks over packed documents is right for every head dim.
HOPPER_SINCE = PACKED_SINK_SINCE = 92600
_PLAIN = EagerBackend()


def cudnn_reason(request: AttentionRequest) -> str | None:
    """Return why the loaded cuDNN cannot compute a request, or None."""
    if request.device_type == "cuda" and not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    version = cudnn_version()
    if request.device_type == "cuda" and not version:
        return "PyTorch cannot load its cuDNN, or finds another release first"
    capability = request.compute_capability
    if capability is not None and capability[0] == 9 and version < HOPPER_SINCE:
        return (
            f"on Hopper it needs cuDNN 9.26 or later, but {version} is installed (earlier ones "
            "give non-finite gradients for unmasked blocks of 64 keys modulo 128)"
        )
    return None


def cudnn_version() -> int:
    """Return the version of the loaded cuDNN; 0 if PyTorch rejects it, or has none."""
    try:
        return torch.backends.cudnn.version() or 0
    except RuntimeError:  # older than the one that PyTorch was built with
        return 0


class CudnnKernel(VendorBackend):
    """A kernel of cuDNN. Small blocks take the eager kernel instead.

    cuDNN refuses a single key. Its backward of a single query gives NaN on Hopper where the LSE is
    far below 0 (9.25 and 9.26, deterministic or not: github.com/NVIDIA/cudnn-frontend/issues/1072).
    Eager's temporaries for one of either are no larger than query or key.
    """

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        packed = call.cu_seqlens is not None
        if key_BGSD.shape[2] == 1 or (packed and query_BHTD.shape[2] == 1):
            call = call._replace(cu_seqlens=None)  # a single document
            return forward_masked(_PLAIN, query_BHTD, key_BGSD, value_BGSD, call)
        return super().forward(query_BHTD, key_BGSD, value_BGSD, call)

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        if 1 in (tensors.query_BHTD.shape[2], tensors.key_BGSD.shape[2]):
            return backward_masked(_PLAIN, tensors, call._replace(cu_seqlens=None))
        return super().backward(tensors, call)
