"""Statistics recorded by an attention layer in addition to head importance.

Nothing here changes what the layer computes: gradients are read by hooks, and all data stays on the
device.

Shapes: S sequence, B batch, H heads of this rank (query heads, or the groups of a key or value
gate), G key/value groups, T queries, D head dim, C gates per head and token, 1 or D.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasink.attention import first_key_share
from megasink.attention.definitions import SINK_TOKENS
from megasink.balance.sums import GATE, OTHER_GRADIENT

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig


class HeadObserver:
    """Records statistics of one layer on observed steps and in evaluations.

    Args:
        config: Config whose ``statistics`` receive the records.
        layer_number: 1-based index in the whole model.
        rank: Index of this share of the layer's heads: H heads starting at rank * H.
    """

    def __init__(self, config: "MegasinkTransformerConfig", layer_number: int, rank: int):
        self._statistics = config.statistics
        self._balances = config.head_balance_coeff > 0
        self._layer = layer_number - 1
        self._rank = rank

    @property
    def observes(self) -> bool:
        """Whether the current step is observed."""
        return self._statistics.heads.observes

    @property
    def compares_gradients(self) -> bool:
        """Whether the current step records the gradients at the gates."""
        return self.observes and self._balances

    @property
    def counts_sinks(self) -> bool:
        """Whether a running evaluation counts attention sinks."""
        return self._statistics.sinks is not None

    def add(self, name: str, sum_H: Tensor, weight: int, *, replicated: bool = False) -> None:
        """Add to a series if the current step is observed.

        Args:
            name, sum_H, weight: See :meth:`HeadSums.add`.
            replicated: Whether every tensor-parallel rank has the same heads, for different tokens.
        """
        if self.observes:
            first = 0 if replicated else len(sum_H) * self._rank
            self._statistics.heads.add(name, self._layer, first, sum_H, weight)

    def explicit_gate(self, gate_SBHC: Tensor, *, replicated: bool) -> None:
        """Record the mean of a gate that is not the head importance; `replicated` as in `add`."""
        if self.observes and torch.is_grad_enabled():
            sequence, batch, _, width = gate_SBHC.shape
            sum_H = gate_SBHC.detach().sum((0, 1, 3)) / width
            self.add(GATE, sum_H, sequence * batch, replicated=replicated)

    def output_gradient(
        self,
        out_BHTD: Tensor,
        gate_BHTC: Tensor,
        value_BHTD: Tensor | None = None,
        counted: int | None = None,
    ) -> None:
        """Record in the backward pass the gradient that reaches the gate logit through the output.

        Call it only if `compares_gradients`.

        Args:
            out_BHTD: Gated output; the loss must depend on this tensor object.
            gate_BHTC: Its gate.
            value_BHTD: Output of a closed gate, broadcastable; None for 0.
            counted: Number of tokens that are not padding; None for all.
        """
        from megasink.attention import gate_bias_gradient

        batch, _, tokens, _ = out_BHTD.shape
        count = batch * tokens if counted is None else counted
        kept_BHTD, gate_BHTC = out_BHTD.detach(), gate_BHTC.detach()

        def record(grad_BHTD: Tensor) -> None:
            sum_H = gate_bias_gradient(grad_BHTD, kept_BHTD, gate_BHTC, value_BHTD)
            self.add(OTHER_GRADIENT, sum_H, count)

        out_BHTD.register_hook(record)

    def softmax_sinks(
        self,
        query_BHTD: Tensor,
        key_BGSD: Tensor,
        lse_BHT: Tensor,
        slot_gate_BHT: Tensor | None,
        **mask: Any,
    ) -> None:
        """Count the sinks of a microbatch of softmax attention; call it only if `counts_sinks`.

        Args:
            query_BHTD, key_BGSD, lse_BHT, mask: See :func:`first_key_share`.
            slot_gate_BHT: Gate of the sink slot; None if there is no slot.
        """
        first_BH = first_key_share(query_BHTD, key_BGSD, lse_BHT, SINK_TOKENS, **mask)
        slot_BH = None if slot_gate_BHT is None else 1.0 - slot_gate_BHT[..., :SINK_TOKENS].mean(-1)
        self._count_sinks(first_BH, slot_BH)

    def similarity_sinks(self, first_weight_BHT: Tensor) -> None:
        """Count the sinks from the weight of every query on the first key."""
        self._count_sinks(first_weight_BHT[..., :SINK_TOKENS].mean(-1), None)

    def _count_sinks(self, first_BH: Tensor, slot_BH: Tensor | None) -> None:
        first = first_BH.shape[1] * self._rank
        assert self._statistics.sinks is not None
        self._statistics.sinks.record(self._layer, first, first_BH, slot_BH)
