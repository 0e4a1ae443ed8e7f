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
from megasink.attention.layout import dense_rows, padded


@dataclass(frozen=True)
class AttentionRequest:
    """An attention configuration, described without tensors."""

    device_type: str  # "cpu" or "cuda"
    dtype: torch.dtype  # of query, key and value
    head_dim: int  # of query and key
    variant: str = "vanilla"  # a name in `megasink.attention.VARIANTS`
    window: int | None = None  # tokens visible to a token, including itself; None for all
    causal: bool = True
    distance_bias: bool = False  # whether a bias by head and distance is added (P2.20 to P2.22)
    needs_gate_gradient: bool = True  # whether a loss on the gate or on the LSE is differentiated
    dropout: float = 0.0
    compute_capability: tuple[int, int] | None = None  # of the CUDA device; None if unknown
    deterministic: bool = False  # whether the gradients must be the same in every run
    value_dim: int | None = None  # head dim of the values, at most that of the keys; None: equal


class Backend(ABC):
    """An attention kernel: causal on square blocks, unmasked on rectangular ones.

    `megasink.attention.mask_blocks` builds everything else (sinks, windows, prefixes, bottom-right
    causal masks) from such blocks, so a new kernel only needs `forward` and `backward`. They read
    `scale` and `causal` from the `AttentionCall`, and the fields named by the attributes below.
    """

    name: str  # by which users select it
    native_window: bool = False  # whether it reads `window`; otherwise that is always None
    # Whether it aligns the last of T < S causal queries with the last key, or takes squares alone.
    bottom_right: bool = False
    # Whether it reads `cu_seqlens`: the documents of a batch of 1, each aligned bottom right,
    # together with the other masks that it takes.
    packs: bool = False
    # Whether `backward` reads `lse_grad_BHT`. Otherwise it is always None, and the gradient enters
    # through `out_BHTD` (`megasink.attention.injection`).
    takes_lse_gradient: bool = False
    writes_gradients: bool = False  # whether `backward` writes into `into` and returns that
    # Whether it reads `sink_H`, adds exp(sink_h) to every softmax denominator, and returns the
    # gradient of the sink, that of the LSE included. Otherwise it is always None.
    takes_sink: bool = False
    # Whether it reads `distance_bias_HS`, with a window and the whole causal mask (the last of
    # T <= S queries is at the last key). Otherwise no request with a bias selects it.
    takes_distance_bias: bool = False

    @abstractmethod
    def supports(self, request: AttentionRequest) -> str | None:
        """Return None if this backend computes the request exactly, else the reason as a clause."""

    def sink_reason(self, request: AttentionRequest) -> str | None:
        """Return why the sink is added outside of this kernel, or None if it takes it."""
        return None if self.takes_sink else f"{self.name} does not implement sinks"

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
    """A third-party kernel that requires its own tensor layout.

    Attributes:
        narrow_values: Head dims (of keys, of values) that it takes besides equal ones. Other values
            get zeros up to the head dim of the keys, and the output loses them again: exact, at the
            cost of equal head dims.
    """

    narrow_values: frozenset[tuple[int, int]] = frozenset()

    def _width(self, key_BGSD: Tensor, value_BGSD: Tensor) -> int:
        """Return the head dim of the values for the kernel."""
        dims = key_BGSD.shape[-1], value_BGSD.shape[-1]
        return dims[1] if dims in self.narrow_values else dims[0]

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
        """Run `backward` on tensors from `lay_out`; return the gradients of q, k, v, sink."""

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        check_block(query_BHTD, key_BGSD, call, self.bottom_right)
        wide_BGSD = padded(value_BGSD, self._width(key_BGSD, value_BGSD))
        out, lse_BHT = self.launch_forward(
            self.lay_out(query_BHTD), self.lay_out(key_BGSD), self.lay_out(wide_BGSD), call
        )
        return self.read(out)[..., : value_BGSD.shape[-1]], lse_BHT

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        check_block(tensors.query_BHTD, tensors.key_BGSD, call, self.bottom_right)
        own = tensors.value_BGSD.shape[-1]
        if (width := self._width(tensors.key_BGSD, tensors.value_BGSD)) != own:
            tensors = tensors._replace(
                grad_out_BHTD=padded(tensors.grad_out_BHTD, width),
                value_BGSD=padded(tensors.value_BGSD, width),
                out_BHTD=padded(tensors.out_BHTD, width),
                into=None,
            )
        inputs = (*map(self.lay_out, tensors[:5]), tensors.lse_BHT, tensors.lse_grad_BHT)
        laid_out = BackwardTensors._make((*inputs, self.lay_out_results(tensors.into)))
        grads = self.launch_backward(laid_out, call)
        grad_sink_H = None if call.sink_H is None else grads[3]
        grad_query, grad_key, grad_value = map(self.read, grads[:3])
        return Gradients(grad_query, grad_key, grad_value[..., :own], None, grad_sink_H)

    def lay_out_results(
        self, into: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return views in the kernel's layout, or None if it would need copies."""
        return None


def check_block(
    query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall, bottom_right: bool = False
) -> None:
    """Reject causal rectangles, unless the kernel aligns those of T < S queries bottom right.

    aten's CPU flash and cuDNN silently align them top left.
    """
    queries, keys = query_BHTD.shape[2], key_BGSD.shape[2]
    aligned = queries < keys and (bottom_right or call.cu_seqlens)
    if call.causal and queries != keys and not aligned:
        raise ValueError(
            f"a causal block must be square, got {queries} queries and {keys} keys: see plan_blocks"
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
