"""What a backend is: the facts asked of it, and the two calls it answers.

Shapes: B batch, H query heads, G key/value groups (H a multiple of G), T queries, S keys, D head
dim. Scores are z_ij = scale * q_i . k_j; LSE_i = log sum_j exp z_ij over the visible keys.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionRequest:
    """One attention configuration, described without a tensor.

    Attributes:
        device_type: "cpu" or "cuda".
        dtype: of query, key and value.
        head_dim: D, of query, key and value alike.
        variant: "vanilla", "sink" or "off-by-one" (papers P0.1, P0.2).
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
    `megasink.attention.blocks`, so a new kernel needs these two calls and nothing more. One that
    adds a bias to the scores has two calls more, which take the whole causal mask.

    Attributes:
        name: what the user asks for.
        native_window: the calls take `window`; otherwise it is always None.
        takes_lse_gradient: `backward` takes `lse_grad_BHT`; otherwise it is always None and the
            gradient enters through `out_BHTD` (`megasink.attention.injection`).
        takes_distance_bias: has `forward_biased` and `backward_biased`; otherwise it is not chosen
            for a request with a bias.
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
        self,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns out_BHTD and lse_BHT (natural logarithm, float32, or float64 for float64)."""

    @abstractmethod
    def backward(
        self,
        grad_out_BHTD: Tensor,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
        lse_grad_BHT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value, in their shapes and dtypes.

        `out_BHTD` and `lse_BHT` may belong to a softmax over more keys than these (other blocks, a
        sink): with P_ij = exp(z_ij - lse_i), dS_ij = P_ij (dO_i . v_j - dO_i . out_i + lse_grad_i).
        """

    def forward_biased(
        self,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        distance_bias_HS: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, causal, the last of T <= S queries at the last key, with a bias.

        Args:
            distance_bias_HS: [H, S], statistics dtype: entry [h, i - j] is added to z_ij.
            window: tokens visible to a token, itself included; None for all.
        """
        raise NotImplementedError(f"{self.name} takes no additive bias")

    def backward_biased(
        self,
        grad_out_BHTD: Tensor,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        distance_bias_HS: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        *,
        scale: float,
        window: int | None = None,
        lse_grad_BHT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `backward`, and the gradient of the bias: sums of dS over batch and diagonals."""
        raise NotImplementedError(f"{self.name} takes no additive bias")


def check_block(query_BHTD: Tensor, key_BGSD: Tensor, causal: bool) -> None:
    """Refuses the causal rectangles that kernels answer differently from each other.

    aten's CPU flash aligns them top left, CUDA flash bottom right, both without a word.
    """
    if causal and query_BHTD.shape[2] != key_BGSD.shape[2]:
        raise ValueError(
            f"a causal block must be square, got {query_BHTD.shape[2]} queries and "
            f"{key_BGSD.shape[2]} keys; build it from blocks (attention.blocks.plan_blocks)"
        )


def last_dim_dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension has stride 1, as every kernel needs, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def fp16_reason(request: AttentionRequest) -> str | None:
    """Why a kernel that takes LSE gradients by injection refuses fp16 (docs/maths.md)."""
    if request.dtype is torch.float16 and request.needs_gate_gradient:
        return (
            "the gradient of the gate enters through the output tensor, with values up to 2**60, "
            "which float16 cannot hold"
        )
    return None
