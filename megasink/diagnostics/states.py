"""The residual stream: norms, massive activations, and directions shared by inputs.

States are numbered by halves: x_0 is the embedding, x_(l + 1/2) the state after the attention
residual of block l, x_(l + 1) its output; the last one is before the final norm.

Shapes: N samples, T tokens, E hidden size, P kept positions.
"""

import torch
from torch import Tensor

from megasink.diagnostics.registry import metric


@metric("state_norm", source="P4.1, P2.8, P4.25", unit="L2 norm", axis="state position")
def state_norm(state_TE: Tensor) -> Tensor:
    """Norm of the hidden state of each token."""
    return state_TE.norm(dim=-1)


@metric(
    "massive_ratio",
    source="P2.10",
    unit="ratio",
    axis="state",
    shown=("table", "curve", "scalar"),
    scalar="max over block outputs",
    title="norm of token 0 over others",
    figure="activations",
    number="{:.1f}",
)
def massive_ratio(state_TE: Tensor) -> Tensor:
    """Norm of the first token's state over the mean norm of the others; NaN for one token."""
    norm_T = state_TE.norm(dim=-1)
    return norm_T[0] / norm_T[1:].mean()


@metric(
    "state_abs_max",
    source="P1.32, P1.33",
    unit="activation",
    axis="state",
    shown=("table", "curve", "scalar"),
    scalar="mean over block outputs",
    title="largest activation",
    figure="activations",
    number="{:.1f}",
)
def state_abs_max(state_TE: Tensor) -> Tensor:
    """Largest |value| of the state in one sample (attn_residual at halves, ffn_residual else)."""
    return state_TE.abs().amax()


@metric(
    "attention_abs_max",
    source="P1.33",
    unit="activation",
    axis="layer",
    shown=("table", "curve"),
    title="largest attention output",
    figure="activations",
)
def attention_abs_max(attention_branch_TE: Tensor) -> Tensor:
    """Largest |value| of the attention output in one sample."""
    return attention_branch_TE.abs().amax()


@metric(
    "mlp_abs_max",
    source="P1.33",
    unit="activation",
    axis="layer",
    shown=("table", "curve"),
    title="largest MLP output",
    figure="activations",
)
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
    """Streamed mean cosine between the states of different inputs at one position (P4.5).

    The mean over pairs i != j of u_i . u_j is (|sum u|^2 - N) / (N (N - 1)) for unit vectors u.

    Args:
        positions: P, number of leading positions of a sequence.

    Attributes:
        unit_sum_PE: float64 sums of unit vectors; None before the first sample.
        count_P: number of samples that reached each position.
    """

    def __init__(self, positions: int):
        self.unit_sum_PE: Tensor | None = None
        self.count_P = torch.zeros(positions, dtype=torch.int64)

    def add(self, state_TE: Tensor) -> None:
        """Add one sample."""
        positions = len(self.count_P)
        state_PE = state_TE[:positions].to("cpu", torch.float64)
        if self.unit_sum_PE is None:
            self.unit_sum_PE = torch.zeros(positions, state_PE.shape[1], dtype=torch.float64)
        self.unit_sum_PE[: len(state_PE)] += torch.nn.functional.normalize(state_PE, dim=-1)
        self.count_P[: len(state_PE)] += 1

    def result(self) -> Tensor:
        """Return [P]: the mean cosine; NaN if fewer than two samples reached the position."""
        if self.unit_sum_PE is None:
            return torch.full(self.count_P.shape, torch.nan, dtype=torch.float64)
        return mean_cosine(self.unit_sum_PE, self.count_P)


def mean_cosine(unit_sum_PE: Tensor, count_P: Tensor) -> Tensor:
    """Compute the result of `MeanCosine` from its sums; any dimensions may precede P."""
    count_P = count_P.to(torch.float64)
    square_P = unit_sum_PE.square().sum(-1)
    pairs_P = count_P * (count_P - 1)
    return torch.where(count_P > 1, (square_P - count_P) / pairs_P, torch.nan)
