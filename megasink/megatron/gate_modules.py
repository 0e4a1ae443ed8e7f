"""The module of the explicit gate.

Shapes: S sequence, B batch; H query heads or key/value groups (depending on the gate position) of
this tensor-parallel rank; D head dim; C scores per head and token, 1 or D.
"""

from typing import TYPE_CHECKING

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import (
    AttentionRequest,
    apply_gate,
    choose_gate_kernels,
    gate_values,
    mean_over_heads,
)
from megasink.attention.gate_kernels import GateRows, gate_kernels_named
from megasink.attention.kernels.backend import compute_capability
from megasink.attention.variants.gate_options import gate_shape
from megasink.megatron.parameters import ShardedByHeads, new_parameter

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


class ExplicitGate(ShardedByHeads, MegatronModule):
    """score -> gate -> gated tensor (P1 Eq. 5), for one position of one layer.

    For ``gate_input`` "none", `logit` has the scores [H * C], initialized to 0 (P1.15) and
    one-dimensional, so that Megatron applies no weight decay.
    """

    logit: torch.nn.Parameter | None

    def __init__(self, config: "MegasinkTransformerConfig", tp_group: ProcessGroup):
        super().__init__(config=config)
        self.config: MegasinkTransformerConfig = config
        self.tp_group = tp_group
        self.heads_of_layer, self.width = gate_shape(config)
        # The gate of the layer output is replicated on every rank, for that rank's tokens.
        self.sharded = config.gate_position != "output"
        self.heads = self.heads_of_layer // (tp_group.size() if self.sharded else 1)
        self.logit = None
        if config.gate_input == "none":
            axis, shape = 0 if self.sharded else None, (self.heads * self.width,)
            self.logit = new_parameter(shape, 0.0, config, axis=axis, of_tokens=not self.sharded)

    def forward(self, x_SBHD: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gate a tensor by scores viewable as [S, B, H, C] (not read for ``gate_input`` "none").

        Return it in its dtype, and the gate [S, B, H, C], float32, or its mean over C,
        [S, B, H, 1]. They are the same on observed steps: see `of_elements`.
        """
        config, (sequence, batch, heads, _) = self.config, x_SBHD.shape
        score_SBHC = self._score(x_SBHD, score)
        activation, operation = config.gate_activation, config.gate_operation
        if config.gate_shared_heads:
            gate_SBHC = gate_values(score_SBHC, activation)
            gate_SBHC = mean_over_heads(gate_SBHC, self.heads_of_layer, self._sum_over_ranks)
            out_SBHD = apply_gate(x_SBHD, gate_SBHC, operation)
        elif (gate_rows := self._gate_rows(x_SBHD)) is not None:
            x_BHSD, score_BHSC = x_SBHD.permute(1, 2, 0, 3), score_SBHC.permute(1, 2, 0, 3)
            out_BHSD, gate_BHS = gate_rows(x_BHSD, score_BHSC, activation, operation)
            return out_BHSD.permute(2, 0, 1, 3), gate_BHS.permute(2, 0, 1)[..., None]
        else:
            out_SBHD, gate_SBHC = _gate(x_SBHD, score_SBHC, activation, operation)
        return out_SBHD, gate_SBHC.expand(sequence, batch, heads, self.width)

    @torch.no_grad()
    def of_elements(self, gate_SBHC: Tensor, x_SBHD: Tensor, score: Tensor | None) -> Tensor:
        """Return the gate of each element for an observer, without gradient.

        `gate_SBHC` is the result of `forward` for `x_SBHD` and `score`.
        """
        if gate_SBHC.shape[-1] == self.width:
            return gate_SBHC.detach()
        return gate_values(self._score(x_SBHD, score), self.config.gate_activation)

    def _score(self, x_SBHD: Tensor, score: Tensor | None) -> Tensor:
        sequence, batch, heads, _ = x_SBHD.shape
        if self.logit is not None:
            return self.logit.view(1, 1, heads, self.width)
        assert score is not None
        return score.reshape(sequence, batch, heads, self.width)

    def _gate_rows(self, x_SBHD: Tensor) -> GateRows | None:
        """Return the kernel that gates this tensor, or None for PyTorch's operations."""
        config = self.config
        if self.logit is not None:
            return None  # scores for no token
        request = AttentionRequest(
            device_type=x_SBHD.device.type,
            dtype=x_SBHD.dtype,
            head_dim=x_SBHD.shape[-1],
            compute_capability=compute_capability(x_SBHD.device),
        )
        choice = choose_gate_kernels(request, config.attention_kernel)
        return gate_kernels_named(choice.name).gate_rows

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        """Sum in forward and backward: the heads of every rank read the shared gate."""
        total = reduce_from_tensor_model_parallel_region(total, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(total, group=self.tp_group)


@jit_fuser  # as for Megatron's own output gate: one GPU kernel, saves no float32 copy for backward
def _gate(x: Tensor, score: Tensor, activation: str, operation: str) -> tuple[Tensor, Tensor]:
    gate = gate_values(score, activation)
    return apply_gate(x, gate, operation), gate
