"""Megatron's SelfAttention with an explicit gate (P1) or a norm of the SDPA output.

Shapes: S sequence, B batch, H query heads and G key/value groups of this tensor-parallel rank,
N either of these, D head dim, X = H * D, M hidden size. Under sequence parallelism the input and
output hold a part of S, and everything in between the whole.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from torch import Tensor

from megasink.attention.variants.gate_options import (
    changes_self_attention,
    counts_heads,
    gates_explicitly,
    is_megatrons_output_gate,
    trailing_rows,
)
from megasink.megatron.gate_modules import ExplicitGate, HeadNorm

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


class GatesHeads:
    """For an attention layer that gates the output of its heads, and counts them by that gate."""

    training: bool
    gate: ExplicitGate | None
    counts_heads: bool
    core_attention: Any
    replicated = False  # Whether each rank has the gate of its own tokens

    def _gate_heads(self, ungated_SBHD: Tensor, scores: Tensor | None) -> Tensor:
        """Return the gated output [S, B, X]."""
        assert self.gate is not None
        x_SBHD, gate_SBHC = self.gate(ungated_SBHD, scores)
        if not self.counts_heads:
            self._observe(gate_SBHC)
        # The first forward of activation recompute has no gradients and is not counted.
        if not (self.counts_heads and self.training and torch.is_grad_enabled()):
            return x_SBHD.flatten(2)
        core, gate_BHSC, every_BHSC = self.core_attention, gate_SBHC.permute(1, 2, 0, 3), None
        if core.observer.compares_gradients:
            x_BHSD = x_SBHD.permute(1, 2, 0, 3)
            real = None if core.documents is None else core.documents.real_tokens
            every_SBHC = self.gate.of_elements(gate_SBHC, ungated_SBHD, scores)
            every_BHSC = every_SBHC.permute(1, 2, 0, 3)
            core.observer.output_gradient(x_BHSD, every_BHSC, counted=real)
            x_SBHD = x_BHSD.permute(2, 0, 1, 3)
        counted: Tensor = core.head_counter(
            x_SBHD.flatten(2), gate_BHSC, core.documents, every_BHSC
        )
        return counted

    def _observe(self, gate_SBHC: Tensor) -> None:
        self.core_attention.observer.explicit_gate(gate_SBHC, replicated=self.replicated)


class GatedSelfAttention(GatesHeads, SelfAttention):
    """SelfAttention for ``attention_variant`` "gated" and for ``sdpa_output_norm``.

    Scores are parameters or come from extra rows of ``linear_qkv``
    (:mod:`megasink.megatron.gate_projection`), in Megatron's own layout if it has one.
    `linear_gate` [M, M] of the layer output's gate (G5) is replicated on every tensor-parallel
    rank.
    """

    def __init__(
        self,
        config: "MegasinkTransformerConfig",
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **kwargs: Any,
    ):
        assert changes_self_attention(config)
        position = config.gate_position if gates_explicitly(config) else None
        groups, ranks = config.num_query_groups, config.tensor_model_parallel_size
        if position in ("query", "key", "value") and groups < ranks:
            raise ValueError(
                f"the {position} gate needs a key/value group for each tensor-parallel rank: "
                f"{groups} groups on {ranks} ranks"
            )
        super().__init__(config, submodules, layer_number, **kwargs)
        self.position, self.replicated = position, position == "output"
        self.gate = ExplicitGate(config, self.tp_group) if position is not None else None
        self.output_norm = None
        if config.sdpa_output_norm != "none":
            self.output_norm = HeadNorm(config, self.tp_group)
        self.counts_heads = counts_heads(config) and self.core_attention.counted
        self.has_rows = trailing_rows(config) > 0
        self.linear_gate = None
        if self.position == "output" and config.gate_input == "hidden":
            self.linear_gate = _replicated_linear(config)
        if self.position in ("query", "key", "value"):
            # Megatron splits and normalizes query, key and value together, right after linear_qkv.
            self.linear_qkv.register_forward_hook(self._gate_projected)
        self.megatrons_layout = is_megatrons_output_gate(config)
        if self.position == "sdpa" or self.output_norm is not None:
            # Megatron's forward then passes the scores from get_query_key_value_tensors to
            # _apply_output_gate. Set on a copy: elsewhere the flag means Megatron's own weights.
            self.config = copy.copy(config)
            self.config.attention_output_gate = True

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Return query, key and value as Megatron does, plus gate scores if `output_gate`."""
        if not output_gate or self.megatrons_layout:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate, split_qkv
            )
        query, key, value = super().get_query_key_value_tensors(
            hidden_states, key_value_states, False, split_qkv
        )
        takes_scores = self.position == "sdpa" and self.has_rows
        # Megatron only checks that there is a tensor; a parameter or a norm does not read it.
        scores = self.linear_qkv.take_scores() if takes_scores else query.new_empty(0)
        return query, key, value, scores

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize and gate the SDPA output [S, B, X]; count its heads if the gate does."""
        x_SBHD = x.view(*x.shape[:2], -1, self.hidden_size_per_attention_head)
        if self.output_norm is not None:
            x_SBHD = self.output_norm(x_SBHD)
        if self.position != "sdpa" or self.gate is None:
            return x_SBHD.reshape(x.shape)
        if self.core_attention.frees_projection:
            gate = gate.contiguous()  # the scores are a view of the projection, too
        return self._gate_heads(x_SBHD, gate)

    def _gate_projected(
        self, linear_qkv: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """Gate the queries, keys or values in the rows [q... | k | v] of each group."""
        mixed, bias = output
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        groups, head_dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed_SBGND = mixed.view(*mixed.shape[:2], groups, queries + 2, head_dim)
        parts = list(mixed_SBGND.split([queries, 1, 1], dim=3))
        chosen = ("query", "key", "value").index(self.position or "")
        scores = linear_qkv.take_scores() if self.has_rows else None
        assert self.gate is not None
        gated_SBND, gate_SBNC = self.gate(parts[chosen].flatten(2, 3), scores)
        self._observe(gate_SBNC)
        parts[chosen] = gated_SBND.view_as(parts[chosen])
        return torch.cat(parts, dim=3).view(mixed.shape), bias

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run Megatron's forward; a gate of the layer output also covers the projection bias."""
        output, bias = super().forward(hidden_states, *args, **kwargs)
        if self.position != "output" or self.gate is None:
            return output, bias
        output = output if bias is None else output + bias
        scores = None if self.linear_gate is None else self.linear_gate(hidden_states)
        gated_SB1M, gate_SB1C = self.gate(output.unsqueeze(2), scores)
        self._observe(gate_SB1C)
        return gated_SB1M.squeeze(2), None


def _replicated_linear(config: "MegasinkTransformerConfig") -> torch.nn.Linear:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    linear = torch.nn.Linear(
        config.hidden_size,
        config.hidden_size,
        bias=config.add_bias_linear or config.add_qkv_bias,
        device=device,
        dtype=config.params_dtype,
    )
    for parameter in linear.parameters():
        # Each rank sees only its own tokens; finalize_model_grads then sums over the ranks.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    if linear.bias is not None:
        torch.nn.init.zeros_(linear.bias)
    return linear
