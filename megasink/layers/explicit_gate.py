"""The explicit gate and the norm of the SDPA output as modules, with their own parameters.

Shapes: S sequence, B batch; H heads of this tensor-parallel rank, query heads or key/value groups
as the gate's position has it; D head dim; C scores per head and token, 1 or D.
"""

import torch
from megatron.core.jit import jit_fuser
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.attention import apply_gate, gate_values, head_rms_norm, mean_over_heads
from megasink.gate_options import gate_shape
from megasink.layers.parameters import ShardedByHeads, new_parameter
from megasink.layers.transformer_config import MegasinkTransformerConfig


class ExplicitGate(ShardedByHeads, MegatronModule):
    """score -> gate -> gated tensor (P1 Eq. 5), for one position of one layer.

    Args:
        config: with the GateOptions.
        tp_group: the tensor-parallel group, over which heads are divided.

    Attributes:
        logit: for ``gate_input`` "none", the scores themselves [H * C], 0 at first (P1.15). One
            dimension, so that Megatron does not decay it.
    """

    logit: torch.nn.Parameter | None

    def __init__(self, config: MegasinkTransformerConfig, tp_group: ProcessGroup):
        super().__init__(config=config)
        self.config: MegasinkTransformerConfig = config
        self.tp_group = tp_group
        self.heads_of_layer, self.width = gate_shape(config)
        # The gate of the layer's output stands on every rank, for the tokens that the rank has.
        self.sharded = config.gate_position != "output"
        self.heads = self.heads_of_layer // (tp_group.size() if self.sharded else 1)
        self.logit = None
        if config.gate_input == "none":
            self.logit = new_parameter(
                (self.heads * self.width,), 0.0, config, sharded=self.sharded
            )

    def forward(self, x_SBHD: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gate a tensor.

        Args:
            x_SBHD: what is gated.
            score: [S, B, H * C], or any shape that views as [S, B, H, C]; not read where
                ``gate_input`` is "none".

        Returns:
            the gated tensor, in its dtype, and the gate [S, B, H, C], float32.
        """
        config, (sequence, batch, heads, _) = self.config, x_SBHD.shape
        if self.logit is not None:
            score_SBHC = self.logit.view(1, 1, heads, self.width)
        else:
            assert score is not None
            score_SBHC = score.reshape(sequence, batch, heads, self.width)
        activation, operation = config.gate_activation, config.gate_operation
        if config.gate_shared_heads:
            gate_SBHC = gate_values(score_SBHC, activation)
            gate_SBHC = mean_over_heads(gate_SBHC, self.heads_of_layer, self._sum_over_ranks)
            out_SBHD = apply_gate(x_SBHD, gate_SBHC, operation)
        else:
            out_SBHD, gate_SBHC = _gate(x_SBHD, score_SBHC, activation, operation)
        return out_SBHD, gate_SBHC.expand(sequence, batch, heads, self.width)

    def _sum_over_ranks(self, total: Tensor) -> Tensor:
        """Both ways: each rank's heads read the shared gate, so its gradient is a sum too."""
        total = reduce_from_tensor_model_parallel_region(total, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(total, group=self.tp_group)


class HeadNorm(ShardedByHeads, MegatronModule):
    """RMSNorm (P1.16) or SiLU (P1.17) on the SDPA output of each head.

    Attributes:
        weight: for RMSNorm, [H * D], 1 at first. The paper does not say whether heads share it; a
            weight for each is what GroupNorm has, and needs no reduction over the ranks.
    """

    weight: torch.nn.Parameter | None

    def __init__(self, config: MegasinkTransformerConfig, tp_group: ProcessGroup):
        super().__init__(config=config)
        self.config: MegasinkTransformerConfig = config
        self.tp_group = tp_group
        self.weight = None
        if config.sdpa_output_norm == "rmsnorm":
            heads = config.num_attention_heads // tp_group.size()
            self.weight = new_parameter((heads * config.kv_channels,), 1.0, config, sharded=True)

    def forward(self, x_SBHD: Tensor) -> Tensor:
        """In the dtype of the input."""
        if self.weight is None:
            return torch.nn.functional.silu(x_SBHD)
        weight_HD = self.weight.view(*x_SBHD.shape[-2:])
        return head_rms_norm(x_SBHD, weight_HD, self.config.layernorm_epsilon)


@jit_fuser  # as Megatron's own output gate: one kernel on GPUs, nothing wide is kept for backward
def _gate(x: Tensor, score: Tensor, activation: str, operation: str) -> tuple[Tensor, Tensor]:
    gate = gate_values(score, activation)
    return apply_gate(x, gate, operation), gate
