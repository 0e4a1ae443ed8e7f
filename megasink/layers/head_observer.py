"""What one attention layer tells the statistics of its model, beside the importance of its heads.

Nothing here changes what the layer computes: gradients are read by hooks, and everything stays on
the device.

Shapes: S sequence, B batch, H heads of this rank (query heads, or the groups of a key or value
gate), G key/value groups, T queries, D head dim, C gates per head and token, 1 or D.
"""

from typing import Any

import torch
from torch import Tensor

from megasink.attention import first_key_share, gate_bias_gradient
from megasink.balance.tracker import GATE, OTHER_GRADIENT
from megasink.definitions import SINK_TOKENS
from megasink.layers.documents import Documents
from megasink.layers.transformer_config import MegasinkTransformerConfig


class HeadObserver:
    """Records for one layer, on the steps and in the evaluations that ask for it.

    Args:
        config: its ``statistics`` get what is recorded.
        layer_number: 1-based index in the whole model.
        rank: which share of the layer's heads is seen here: H heads from rank * H on.
    """

    def __init__(self, config: MegasinkTransformerConfig, layer_number: int, rank: int):
        self._statistics = config.statistics
        self._balances = config.head_balance_coeff > 0
        self._layer = layer_number - 1
        self._rank = rank

    @property
    def compares_gradients(self) -> bool:
        """Whether the gradients at the gates are recorded on the running step."""
        return self._statistics.heads.observes and self._balances

    @property
    def counts_sinks(self) -> bool:
        """Whether an evaluation is running whose attention sinks are counted."""
        return self._statistics.sinks.collects

    def add(self, name: str, sum_H: Tensor, weight: int, *, replicated: bool = False) -> None:
        """Add to a series, where the running step is observed.

        Args:
            name, sum_H, weight: see :meth:`HeadTracker.add`.
            replicated: every tensor-parallel rank has the same heads, for tokens of its own.
        """
        heads = self._statistics.heads
        if heads.observes:
            first = 0 if replicated else len(sum_H) * self._rank
            heads.add(name, self._layer, first, sum_H, weight)

    def explicit_gate(self, gate_SBHC: Tensor, *, replicated: bool) -> None:
        """Record the mean of a gate that is not the head importance; `replicated` as in `add`."""
        if self._statistics.heads.observes and torch.is_grad_enabled():
            sequence, batch, _, width = gate_SBHC.shape
            sum_H = gate_SBHC.detach().sum((0, 1, 3)) / width
            self.add(GATE, sum_H, sequence * batch, replicated=replicated)

    def output_gradient(
        self,
        out_BHTD: Tensor,
        gate_BHTC: Tensor,
        value_BHTD: Tensor | None = None,
        documents: Documents | None = None,
    ) -> None:
        """Record in the backward pass what comes through the output to the logit of the gate.

        To be called where `compares_gradients`.

        Args:
            out_BHTD: the gated output; the loss must depend on this very tensor.
            gate_BHTC: its gate.
            value_BHTD: what a closed gate lets through, broadcastable; None for 0.
            documents: of a packed batch, whose padding does not count.
        """
        batch, _, tokens, _ = out_BHTD.shape
        count = batch * tokens if documents is None else documents.real_tokens
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
        """Count the sinks of a microbatch of softmax attention, where `counts_sinks`.

        Args:
            query_BHTD, key_BGSD, lse_BHT, mask: as :func:`first_key_share` takes them.
            slot_gate_BHT: of a sink beside the keys; None for none.
        """
        first_BH = first_key_share(query_BHTD, key_BGSD, lse_BHT, SINK_TOKENS, **mask)
        slot_BH = None if slot_gate_BHT is None else 1.0 - slot_gate_BHT[..., :SINK_TOKENS].mean(-1)
        self._count_sinks(first_BH, slot_BH)

    def similarity_sinks(self, first_weight_BHT: Tensor) -> None:
        """The same from the weight of every query on the first key."""
        self._count_sinks(first_weight_BHT[..., :SINK_TOKENS].mean(-1), None)

    def _count_sinks(self, first_BH: Tensor, slot_BH: Tensor | None) -> None:
        first = first_BH.shape[1] * self._rank
        self._statistics.sinks.record(self._layer, first, first_BH, slot_BH)
