"""Megatron's SelfAttention with an explicit gate on the SDPA output (P1).

Shapes: S sequence, B batch, H query heads of this tensor-parallel rank, D head dim, X = H * D.
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
from megasink.megatron.gate_modules import ExplicitGate

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
        observer = core.observer()
        if observer is not None and observer.compares_gradients:
            x_BHSD = x_SBHD.permute(1, 2, 0, 3)
            real = None if core.documents is None else core.documents.real_tokens
            every_SBHC = self.gate.of_elements(gate_SBHC, ungated_SBHD, scores)
            every_BHSC = every_SBHC.permute(1, 2, 0, 3)
            observer.output_gradient(x_BHSD, every_BHSC, counted=real)
            x_SBHD = x_BHSD.permute(2, 0, 1, 3)
        counted: Tensor = core.head_counter(
            x_SBHD.flatten(2), gate_BHSC, core.documents, every_BHSC
        )
        return counted

    def _observe(self, gate_SBHC: Tensor) -> None:
        if (observer := self.core_attention.observer()) is not None:
            observer.explicit_gate(gate_SBHC, replicated=self.replicated)


class GatedSelfAttention(GatesHeads, SelfAttention):
    """SelfAttention for ``attention_variant`` "gated"; `gate_positions` has its other places.

    Scores are parameters or come from extra rows of ``linear_qkv``
    (:mod:`megasink.megatron.gate_projection`), in Megatron's own layout if it has one.
    """

    output_norm: torch.nn.Module | None
    linear_gate: torch.nn.Module | None

    def __init__(
        self,
        config: "MegasinkTransformerConfig",
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        **kwargs: Any,
    ):
        assert changes_self_attention(config)
        super().__init__(config, submodules, layer_number, **kwargs)
        self.position = config.gate_position if gates_explicitly(config) else None
        self.replicated = self.position == "output"
        self.gate = ExplicitGate(config, self.tp_group) if self.position is not None else None
        self.output_norm = self.linear_gate = None
        self.counts_heads = counts_heads(config) and self.core_attention.counted
        self.has_rows = trailing_rows(config) > 0
        self.megatrons_layout = is_megatrons_output_gate(config)
        if self.position == "sdpa" or config.sdpa_output_norm != "none":
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
