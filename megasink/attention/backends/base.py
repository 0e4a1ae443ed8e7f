"""What a backend is: the facts asked of it, and the two calls it answers.

Shapes: B batch, H query heads, G key/value groups (H a multiple of G), T queries, S keys, D head
dim. Scores are z_ij = scale * q_i . k_j; LSE_i = log sum_j exp z_ij over the visible keys.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, BackwardTensors, Gradients


@dataclass(frozen=True)
class AttentionRequest:
    """One attention configuration, described without a tensor.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: of query, key and value.
        head_dim: D, of query, key and value alike.
        variant: a name of `megasink.attention.VARIANTS`.
        window: tokens visible to a token, itself included; None for all.
        causal: whether token i sees only keys j <= i.
        distance_bias: whether a bias by head and distance is added to the scores (P2.20 to P2.22).
        needs_gate_gradient: whether a loss on the gate or on the LSE will be differentiated.
        dropout: probability of dropping an attention weight.
        compute_capability: of the CUDA device; None when not known (yet).
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


class Backend(ABC):
    """An attention kernel: causal on square blocks, unmasked on rectangular ones.

    Everything else (sinks, windows, prefixes, bottom-right causal masks) is made of such blocks by
    `megasink.attention.block_masks`, so a new kernel needs these two calls and nothing more. Of the
    `AttentionCall` they read `scale`, `causal` and what the attributes below name.

    Attributes:
        name: what the user asks for.
        native_window: the calls read `window`; otherwise it is always None.
        takes_lse_gradient: `backward` reads `lse_grad_BHT`; otherwise it is always None and the
            gradient enters through `out_BHTD` (`megasink.attention.injection`).
        takes_distance_bias: the calls read `distance_bias_HS`, then with a window and the whole
            causal mask: the last of T <= S queries stands at the last key. Otherwise it is always
            None, and the backend is not chosen for a request with a bias.
    """

    name: str
    native_window: bool = False
    takes_lse_gradient: bool = False
    takes_distance_bias: bool = False

    @abstractmethod
    def supports(self, request: AttentionRequest) -> str | None:
        """None if this backend computes the request exactly, else why not, as a clause."""

    @abstractmethod
    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """Returns out_BHTD and lse_BHT (natural logarithm, float32, or float64 for float64)."""

    @abstractmethod
    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        """Returns gradients in the shapes and dtypes of their inputs.

        `out_BHTD` and `lse_BHT` may belong to a softmax over more keys than these (other blocks, a
        sink): with P_ij = exp(z_ij - lse_i), dS_ij = P_ij (dO_i . v_j - dO_i . out_i + lse_grad_i).
        The gradient of a distance bias is the sum of dS over batch and diagonals.
        """


class VendorBackend(Backend):
    """A kernel that somebody else wrote: it wants its tensors laid out in a way of its own."""

    def lay_out(self, tensor_BHTD: Tensor) -> Tensor:
        """As the kernel takes it; every kernel needs the last dimension dense."""
        return tensor_BHTD if tensor_BHTD.stride(-1) == 1 else tensor_BHTD.contiguous()

    def read(self, tensor: Tensor) -> Tensor:
        """What the kernel returned, as [B, H, T, D]."""
        return tensor

    @abstractmethod
    def launch_forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """`forward` with tensors as `lay_out` gives them; the LSE is [B, H, T]."""

    @abstractmethod
    def launch_backward(self, tensors: BackwardTensors, call: AttentionCall) -> Sequence[Tensor]:
        """`backward`, all but the statistics as `lay_out` gives them.

        Returns:
            The gradients of query, key and value as the kernel returns them.
        """

    def forward(
        self, query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.forward`."""
        check_block(query_BHTD, key_BGSD, call)
        out, lse_BHT = self.launch_forward(
            self.lay_out(query_BHTD), self.lay_out(key_BGSD), self.lay_out(value_BGSD), call
        )
        return self.read(out), lse_BHT

    def backward(self, tensors: BackwardTensors, call: AttentionCall) -> Gradients:
        """See `Backend.backward`."""
        check_block(tensors.query_BHTD, tensors.key_BGSD, call)
        *inputs, lse_BHT, lse_grad_BHT = tensors
        laid_out = BackwardTensors._make((*map(self.lay_out, inputs), lse_BHT, lse_grad_BHT))
        grads = self.launch_backward(laid_out, call)
        return Gradients(*map(self.read, grads))


def check_block(query_BHTD: Tensor, key_BGSD: Tensor, call: AttentionCall) -> None:
    """Refuses the causal rectangles that kernels answer differently from each other.

    aten's CPU flash aligns them top left, CUDA flash bottom right, both without a word.
    """
    if call.causal and query_BHTD.shape[2] != key_BGSD.shape[2]:
        raise ValueError(
            f"a causal block must be square, got {query_BHTD.shape[2]} queries and "
            f"{key_BGSD.shape[2]} keys; build it from blocks (attention.block_masks.plan_blocks)"
        )


def fp16_reason(request: AttentionRequest) -> str | None:
    """Why a kernel that takes LSE gradients by injection refuses fp16 (docs/maths.md)."""
    if request.dtype is torch.float16 and request.needs_gate_gradient:
        return (
            "the gradient of the gate enters through the output tensor, with values up to 2**60, "
            "which float16 cannot hold"
        )
    return None
