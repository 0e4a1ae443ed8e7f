"""Switch heads: each token selects experts of the value and key projections (P1.39).

Expert 0 of a key/value group is its value (or key and value) of linear_qkv. The other experts and
the router, one sigmoid per expert, are trailing rows: [E - 1 experts | E scores] of each group. All
experts are computed for every token, in the GEMM of linear_qkv: selecting them saves no time.

Shapes: S sequence, B batch, G groups of this tensor-parallel rank, E experts, D head dim, X = D, or
2 * D for keys and values; Y rows of a group in linear_qkv, [queries | key | value].
"""

import functools
from typing import Any

import torch
from torch import Tensor

from megasink.attention.explicit_gate import gate_values
from megasink.attention.variants.switch_options import switch_rows
from megasink.megatron.gate_projection import GateRows, with_gate_rows


class SwitchRows(GateRows):
    """Mixin for a column-parallel linear_qkv that returns the selected experts as key and value.

    A checkpoint has their rows as ``linear_switch.weight``.
    """

    part = "linear_switch."
    config: Any

    def rows(self, config: Any) -> int:
        """Return the rows of experts and routers, over all tensor-parallel ranks."""
        return switch_rows(config) * int(config.num_query_groups)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the layer; return its output [S, B, G * Y] with the sums of experts in place."""
        mixed, bias = super().forward(*args, **kwargs)
        config, experts = self.config, self.config.switch_experts
        rows_SBGR = self.take_scores().unflatten(-1, (-1, switch_rows(config)))
        others_SBGR, score_SBGE = rows_SBGR.tensor_split([-experts], dim=-1)
        width = config.kv_channels * (2 if config.switch_heads == "key-value" else 1)
        mixed_SBGY = mixed.unflatten(-1, (rows_SBGR.shape[-2], -1))
        kept_SBGY, own_SBGX = mixed_SBGY.tensor_split([-width], dim=-1)
        expert_SBGEX = torch.cat((own_SBGX, others_SBGR), -1).unflatten(-1, (experts, width))
        chosen_SBGX = sum_of_experts(expert_SBGEX, score_SBGE, config.switch_top_k)
        return torch.cat((kept_SBGY, chosen_SBGX), -1).flatten(-2), bias


with_switch_rows = functools.partial(with_gate_rows, rows=SwitchRows)


def sum_of_experts(expert_TEX: Tensor, score_TE: Tensor, top_k: int) -> Tensor:
    """Sum the `top_k` experts of highest score, each times the sigmoid of its score, in float32.

    Of equal scores the first counts, so that the choice does not depend on the layout.
    """
    weight_TE = gate_values(score_TE, "sigmoid")
    if top_k < score_TE.shape[-1]:
        chosen = score_TE.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
        weight_TE = weight_TE * torch.zeros_like(weight_TE).scatter(-1, chosen, 1.0)
    return (expert_TEX * weight_TE[..., None]).sum(-2).to(expert_TEX.dtype)
