"""Statistics of heads on observed steps and in evaluations, with Sink^eps (P2.2, P2.27).

Observing changes nothing that the layer computes: gradients are read by hooks, and all data stays
on the device.

Shapes: S sequence, B batch, L layers, H query heads of this rank, or the groups of a key or value
gate, h those of this tensor-parallel rank, G key/value groups, T = S tokens, D head dim, C gates
per head and token, 1 or D.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasink import attention as ops
from megasink.attention.constants import SINK_EPSILON, SINK_TOKENS
from megasink.balance.gate_sums import BALANCE_GRADIENT, GATE, OTHER_GRADIENT, SINK
from megasink.megatron.microbatch_documents import first_values

if TYPE_CHECKING:
    from megasink.megatron.config import MegasinkTransformerConfig
    from megasink.megatron.head_balance import HeadBalance


class HeadObserver:
    """Records statistics of one layer on observed steps and in evaluations."""

    def __init__(self, config: "MegasinkTransformerConfig", layer_number: int, rank: int):
        self._statistics = config.statistics
        self._balances = config.head_balance_coeff > 0
        self._layer = layer_number - 1
        self._rank = rank

    @property
    def compares_gradients(self) -> bool:
        """Whether the current step records the gradients at the gates."""
        return self._statistics.heads.observes and self._balances

    def add(self, name: str, sum_H: Tensor, weight: int, *, replicated: bool = False) -> None:
        """Add to a series of an observed step; `replicated` heads are those of every TP rank."""
        if self._statistics.heads.observes:
            first = 0 if replicated else len(sum_H) * self._rank
            self._statistics.heads.add(name, self._layer, first, sum_H, weight)

    def explicit_gate(self, gate_SBHC: Tensor, *, replicated: bool) -> None:
        """Record the mean of a gate that is not the head importance; `replicated` as in `add`."""
        if torch.is_grad_enabled():
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
        """
        batch, _, tokens, _ = out_BHTD.shape
        count = batch * tokens if counted is None else counted
        kept_BHTD, gate_BHTC = out_BHTD.detach(), gate_BHTC.detach()

        def record(grad_BHTD: Tensor) -> None:
            sum_H = ops.gate_bias_gradient(grad_BHTD, kept_BHTD, gate_BHTC, value_BHTD)
            self.add(OTHER_GRADIENT, sum_H, count)

        out_BHTD.register_hook(record)

    def balance_gradient(
        self, gate_BHTC: Tensor, real_BT: Tensor | None, count: int, tokens: int
    ) -> Callable[[Tensor], None]:
        """Return a function that records the gradient of the loss at the gates of a microbatch."""
        slope_h = ops.gate_sum(ops.gate_slope(gate_BHTC), real_BT) / count
        return lambda sent_h: self.add(BALANCE_GRADIENT, sent_h * slope_h, tokens)

    def slot_logit(self, core: Any, query_BHTD: Tensor) -> None:
        """Record the sink logit of a variant that has one per head."""
        if core.variant.logs_slot_logit:
            logit_1H1 = core.slot_logit(query_BHTD)
            assert logit_1H1 is not None
            self.add(SINK, logit_1H1.expand(1, query_BHTD.shape[1], 1).flatten(), 1)

    def softmax(
        self,
        core: Any,
        call: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
        mask: dict[str, Any],
        parameters: dict[str, Tensor],
        *,
        counts: bool,
        counted: int | None,
    ) -> None:
        """Record the sinks or the gradient of a call of softmax attention.

        Args:
            call: The query, key and value of the call, and its result.
            counted: The number of real tokens, if documents are packed.
        """
        query_BHTD, key_BGSD, value_BGSD, out_BHTD, lse_BHT, gate_BHT = call
        record = core.variant
        if self._statistics.sinks is not None and not core.training:
            first_BH = ops.first_key_share(
                query_BHTD,
                key_BGSD,
                lse_BHT,
                SINK_TOKENS,
                scale=core.softmax_scale,
                window=core.window,
                distance_bias_HS=mask.get("distance_bias_HS"),
            )
            self.count_sinks(first_BH, gate_BHT if record.always_gated else None)
        if counts and self.compares_gradients and gate_BHT is not None:
            assert record.slot_value is not None  # rejected by the config
            if core.ring is not None and core.ring.first_value_BG1D is not None:
                value_BGSD = core.ring.first_value_BG1D
            bounds, (_, heads, queries, _) = mask.get("cu_seqlens"), out_BHTD.shape
            value_BHTD = record.slot_value(
                core.config,
                {name: parameter.detach() for name, parameter in parameters.items()},
                lambda: first_values(value_BGSD, heads, bounds, queries),
            )
            self.output_gradient(out_BHTD, gate_BHT[..., None], value_BHTD, counted)

    def count_sinks(self, first_BH: Tensor, slot_gate_BHT: Tensor | None = None) -> None:
        """Count the sinks of a microbatch, by the share of key 0, in an evaluation that does."""
        if self._statistics.sinks is None:
            return
        slot_BH = None if slot_gate_BHT is None else 1.0 - slot_gate_BHT[..., :SINK_TOKENS].mean(-1)
        first = first_BH.shape[1] * self._rank
        self._statistics.sinks.record(self._layer, first, first_BH, slot_BH)


class SinkRate:
    """Counts, per head, the sequences whose mean attention to one key exceeds `SINK_EPSILON`."""

    def __init__(self, layers: int, heads: int):
        self.layers, self.heads = layers, heads
        # [L, 2, 2, H]: first key and slot; number of sequences above the threshold, and total.
        self._table: Tensor | None = None

    def record(self, layer: int, first: int, first_BH: Tensor, slot_BH: Tensor | None) -> None:
        """Add one microbatch of one layer."""
        if self._table is None:
            self._table = self._zeros(first_BH.device)
        for index, share_BH in enumerate((first_BH, slot_BH)):
            if share_BH is not None:
                exceed_h, of_h = self._table[layer, index, :, first : first + share_BH.shape[1]]
                exceed_h += (share_BH > SINK_EPSILON).sum(0)
                of_h += len(share_BH)

    def _zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.layers, 2, 2, self.heads, dtype=torch.float64, device=device)

    def finish(self) -> tuple[Tensor, Tensor]:
        """All-reduce the counts; call it on every rank after the evaluation."""
        table = self._zeros(torch.device("cuda")) if self._table is None else self._table
        torch.distributed.all_reduce(table)
        rates = (table[:, :, 0] / table[:, :, 1]).float()
        return rates[:, 0], rates[:, 1]


def count_sinks(statistics: "HeadBalance") -> None:
    """Count attention sinks until `sink_rates`: an evaluation runs."""
    statistics.sinks = SinkRate(statistics.heads.layers, statistics.heads.heads)


def sink_rates(statistics: "HeadBalance") -> tuple[Tensor, Tensor]:
    """Return what was counted: see `SinkRate.finish`; every rank calls it."""
    counted: SinkRate = statistics.sinks
    statistics.sinks = None
    return counted.finish()
