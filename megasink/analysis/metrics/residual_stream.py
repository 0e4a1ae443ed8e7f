"""The residual stream: norms, massive activations, and directions shared by inputs.

States are numbered by halves: x_0 is the embedding, x_(l + 1/2) the state after the attention
residual of block l, x_(l + 1) its output; the last one is before the final norm.

Shapes: N samples, T tokens, E hidden size, P kept positions.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasink.analysis.metrics.registry import metric

activation = partial(metric, unit="activation", shown=("table", "curve"), figure="activations")


@metric("state_norm", source="P4.1, P2.8, P4.25", unit="L2 norm", axis="state position")
def state_norm(state_TE: Tensor) -> Tensor:
    """Norm of the hidden state of each token."""
    return state_TE.norm(dim=-1)


@activation(
    "massive_ratio",
    source="P2.10",
    unit="ratio",
    axis="state",
    shown=("table", "curve", "scalar"),
    scalar="max over block outputs",
    title="norm of token 0 over others",
    number="{:.1f}",
)
def massive_ratio(state_TE: Tensor) -> Tensor:
    """Norm of the first token's state over the mean norm of the others; NaN for one token."""
    norm_T = state_TE.norm(dim=-1)
    return norm_T[0] / norm_T[1:].mean()


def longest_first_token(ratio_XS: Any) -> Any:
    """Return the block [X] whose output has the longest first token, by `massive_ratio`."""
    return ratio_XS[..., 2::2].argmax(-1)


@activation(
    "state_abs_max",
    source="P1.32, P1.33",
    axis="state",
    shown=("table", "curve", "scalar"),
    scalar="mean over block outputs",
    title="largest activation",
    number="{:.1f}",
)
def state_abs_max(state_TE: Tensor) -> Tensor:
    """Largest |value| of the state in one sample (attn_residual at halves, ffn_residual else)."""
    return state_TE.abs().amax()


@activation("attention_abs_max", source="P1.33", axis="layer", title="largest attention output")
def attention_abs_max(attention_branch_TE: Tensor) -> Tensor:
    """Largest |value| of the attention output in one sample."""
    return attention_branch_TE.abs().amax()


@activation("mlp_abs_max", source="P1.33", axis="layer", title="largest MLP output")
def mlp_abs_max(mlp_branch_TE: Tensor) -> Tensor:
    """Largest |value| of the MLP output in one sample."""
    return mlp_branch_TE.abs().amax()


@metric("attention_branch_norm", source="P4.12", unit="L2 norm", axis="layer position", shown=())
def attention_branch_norm(attention_branch_TE: Tensor) -> Tensor:
    """Norm of the attention output, after W_O, at each token."""
    return attention_branch_TE.norm(dim=-1)


@metric("cosine_across_inputs", source="P4.5", unit="cosine", axis="state position", shown=())
def cosine_across_inputs(cosine_SP: Tensor) -> Tensor:
    """Mean cosine between the states of different samples at one position."""
    return cosine_SP


class MeanCosine:
    """Streamed mean cosine between the states of different inputs at one position (P4.5)."""

    def __init__(self, states: int, positions: int):
        # E is 0 before the first sample.
        self.unit_sum_SPE = torch.zeros(states, positions, 0, dtype=torch.float64)
        self.count_SP = torch.zeros(states, positions, dtype=torch.int64)

    def add(self, half: int, state_TE: Tensor) -> None:
        """Add one state of one sample."""
        states, positions = self.count_SP.shape
        state_PE = state_TE[:positions].to("cpu", torch.float64)
        if not self.unit_sum_SPE.shape[-1]:
            self.unit_sum_SPE = state_PE.new_zeros(states, positions, state_PE.shape[1])
        unit_PE = torch.nn.functional.normalize(state_PE, dim=-1)
        self.unit_sum_SPE[half, : len(state_PE)] += unit_PE
        self.count_SP[half, : len(state_PE)] += 1


def mean_cosine(unit_sum_SPE: Tensor, count_SP: Tensor) -> Tensor:
    """Return [S, P] from the sums of `MeanCosine`; NaN where fewer than two samples reached."""
    # The mean over pairs i != j of u_i . u_j is (|sum u|^2 - N) / (N (N - 1)) for unit vectors u.
    count_SP = count_SP.to(torch.float64)
    square_SP = unit_sum_SPE.square().sum(-1)
    pairs_SP = count_SP * (count_SP - 1)
    return torch.where(count_SP > 1, (square_SP - count_SP) / pairs_SP, torch.nan)
