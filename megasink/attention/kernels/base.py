"""The interface of attention backends.

Shapes: B batch, H query heads, G key/value groups (H a multiple of G), T queries, S keys, D head
dim. Scores are z_ij = scale * q_i . k_j; LSE_i = log sum_j exp z_ij over the visible keys.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients
from megasink.attention.layout import dense_rows


@dataclass(frozen=True)
class AttentionRequest:
    """An attention configuration, described without tensors.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: Dtype of query, key and value.
        head_dim: D, the same for query, key and value.
        variant: A name in `megasink.attention.VARIANTS`.
        window: Tokens visible to a token, including itself; None for all.
        causal: Whether token i sees only keys j <= i.
        distance_bias: Whether a bias by head and distance is added to the scores (P2.20 to P2.22).
        needs_gate_gradient: Whether a loss on the gate or on the LSE will be differentiated.
        dropout: Probability of dropping an attention weight.
        compute_capability: Compute capability of the CUDA device; None if unknown.
        deterministic: Whether the gradients must be the same in every run.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    variant: str = "vanilla"
    window: int | None = None
    causal: bool = True
    distance_bias: bool = False
    needs_gate_gradient: bool = True
    dropout: float = 0.0
    compute_capability: tuple[int, int] | None = None
    deterministic: bool = False


class Backend(ABC):
    """An attention kernel: causal on square blocks, unmasked on rectangular ones.

    `megasink.attention.blocks` builds everything else (sinks, windows, prefixes, bottom-right
    causal masks) from such blocks, so a new kernel only needs `forward` and `backward`. They read
    `scale` and `causal` from the `AttentionCall`, and the fields named by the attributes below.

    Attributes:
        name: Name by which users select the backend.
        native_window: Whether it reads `window`; otherwise `window` is always None.
        takes_lse_gradient: Whether `backward` reads `lse_grad_BHT`; otherwise it is always None and
            the gradient enters through `out_BHTD` (`megasink.attention.injection`).
        takes_distance_bias: Whether it reads `distance_bias_HS`, together with a window and the
            whole causal mask (the last of T <= S queries is at the last key). Otherwise it is
            always None, and the backend is not selected for a request with a bias.
    """

    name: str
    native_window: bool = False
    takes_lse_gradient: bool = False
    takes_distance_bias: bool = False

    @abstractmethod
    def supports(self, request: AttentionRequest) -> str | None:
        """Return None if this backend computes the request exactly, else the reason as a clause."""

    @abstractmethod
    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Return out_BHTD and lse_BHT (natural logarithm, float32, or float64 for float64)."""

    @abstractmethod
    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        """Return gradients with the shapes and dtypes of the inputs.

        `out_BHTD` and `lse_BHT` may come from a softmax over more keys than these (other blocks, a
        sink): with P_ij = exp(z_ij - lse_i), dS_ij = P_ij (dO_i . v_j - dO_i . out_i + lse_grad_i).
        The gradient of a distance bias is dS summed over batch and diagonals.
        """


class VendorBackend(Backend):
    """A third-party kernel that requires its own tensor layout."""

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        """Return the tensor in the kernel's layout; every kernel needs a dense last dimension."""
        return dense_rows(tensor_BHTD)

    def read(self, tensor: Tensor) -> Tensor:
        """Convert a result of the kernel to [B, H, T, D]."""
        return tensor

    @abstractmethod
    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Run `forward` on tensors from `lay_out`; the LSE is [B, H, T]."""

    @abstractmethod
    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        """Run `backward` on tensors from `lay_out`; return the gradients of q, k and v."""

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        check_block(query_BHTD, key_BGSD, call)
        out, lse_BHT = self.launch_forward(
            self.lay_out(query_BHTD), self.lay_out(key_BGSD), self.lay_out(value_BGSD), call
        )
        return self.read(out), lse_BHT

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        check_block(tensors.query_BHTD, tensors.key_BGSD, call)
        *inputs, lse_BHT, lse_grad_BHT = tensors
        laid_out = BackwardTensors._make((*map(self.lay_out, inputs), lse_BHT, lse_grad_BHT))
        grads = self.launch_backward(laid_out, call)
        return Gradients(*map(self.read, grads))


def check_block(query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall) -> None:
    """Reject causal rectangles, which kernels align differently.

    aten's CPU flash silently aligns them top left, CUDA flash bottom right.
    """
    if call.causal and query_BHTD.shape[2] != key_BGSD.shape[2]:
        raise ValueError(
            f"a causal block must be square, got {query_BHTD.shape[2]} queries and "
            f"{key_BGSD.shape[2]} keys; build it from blocks (attention.blocks.plan_blocks)"
        )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for other devices or no driver."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


# Cached: a query costs as much as launching a small kernel.
_capability = lru_cache(torch.cuda.get_device_capability)


def not_on_cuda(request: AttentionRequest) -> str | None:
    """Return why a kernel for CUDA devices cannot run on the request's device, or None."""
    if request.device_type != "cuda":
        return f"it runs on CUDA devices, not on {request.device_type}"
    return None


def fp16_reason(request: AttentionRequest) -> str | None:
    """Return why a kernel with injected LSE gradients rejects fp16 (docs/maths.md), or None."""
    if request.dtype is torch.float16 and request.needs_gate_gradient:
        return (
            "the gradient of the gate enters through the output tensor, with values up to 2**60, "
            "which float16 cannot hold"
        )
    return None
