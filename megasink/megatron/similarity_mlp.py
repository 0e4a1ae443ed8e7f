"""The parameters of the MLP similarity (P2.36).

Shapes: D head dim.
"""

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


class _Weight(torch.nn.Linear):
    """Read its weight through a call, so that the pending gather of ``--overlap-param-gather`` ends
    first."""

    def forward(self, tp_group: ProcessGroup) -> Tensor:  # type: ignore[override]
        """Return the weight; its gradient is summed over the heads of every rank."""
        weight: Tensor = copy_to_tensor_model_parallel_region(self.weight, tp_group)
        return weight


class SimilarityMLP(torch.nn.Module):
    """The two [D, D] weights of mlp(x) = relu(x A^T) B^T, shared by queries, keys and all heads.

    Replicated on every tensor-parallel rank; initialized by megatron/initial_weights.py.
    """

    def __init__(
        self, head_dim: int, *, dtype: torch.dtype, device: torch.device | int | None
    ) -> None:
        super().__init__()
        self.fc1, self.fc2 = (
            _Weight(head_dim, head_dim, bias=False, dtype=dtype, device=device) for _ in range(2)
        )

    def weights(self, tp_group: ProcessGroup) -> tuple[Tensor, Tensor]:
        """Return both weights; their gradients are summed over the heads of every rank."""
        return self.fc1(tp_group), self.fc2(tp_group)
