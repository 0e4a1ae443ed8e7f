"""Sums of every head's gate over the microbatches of a step, and over ranks when it ends.

Shapes: L layers of the model, H query heads, h those of this tensor-parallel rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megasink.balance.loss import head_balance_loss
from megasink.diagnostics.importance import layer_imbalance

# What layers may add on steps that are observed: the sink logit; the mean of an explicit gate that
# is not the importance; the gradients of the balance loss, and of all that comes behind the layer,
# with respect to a bias on the logit of the gate (docs/observing.md).
SINK, GATE, BALANCE_GRADIENT, OTHER_GRADIENT = SERIES = (
    "sink",
    "gate",
    "balance gradient",
    "other gradient",
)


@dataclass(frozen=True)
class HeadStatistics:
    """One step's statistics, over the global batch. On the device: reading one waits for it.

    Attributes:
        importance_LH: mean gate of each head over all tokens (P0.10), float32, NaN for a layer
            that recorded nothing.
        imbalance_L: CV of each layer (P0.13).
        imbalance: mean over layers of CV (Eq. 6), a scalar.
        balance_loss: Eq. 7 or 8, a scalar: of `importance_LH` in the global scope (whose gradient
            uses that of the step before), else its mean over microbatches.
        series: of a step that is observed, each of `SERIES` as a mean, [L, H] float32, NaN where
            nothing was added.
    """

    importance_LH: Tensor
    imbalance_L: Tensor
    imbalance: Tensor
    balance_loss: Tensor
    series: dict[str, Tensor] = field(default_factory=dict)


Receiver = Callable[[Tensor], None]


class HeadTracker:
    """The sums of one model's layers, on the device, until the step ends.

    They are kept in the table that is sent: one all-reduce of one [L, 2 H + 3] tensor per step,
    whatever the layers, stages and microbatches. It starts when the backward pass ends and is
    awaited after the optimizer's step. On a step that is observed the tensor has 2 H further
    columns for each of `SERIES`.

    Args:
        layers: L.
        heads: H.

    Attributes:
        observes: the running step is observed; the same on every rank, from its first microbatch.
    """

    def __init__(self, layers: int, heads: int):
        self.layers, self.heads = layers, heads
        self.observes = False
        # Of each layer: a sum per head, how often each was routed, then tokens, balance loss at
        # coefficient 1, microbatches; of each series a sum and a weight per head.
        self._table: Tensor | None = None
        self._receivers: dict[int, Receiver] = {}
        self._pending: tuple[Tensor, Any] | None = None

    def record(
        self,
        layer: int,
        first: int,
        gate_sum_h: Tensor,
        tokens: int,
        routed_H: Tensor,
        receiver: Receiver,
    ) -> None:
        """Add one microbatch of one layer.

        Args:
            layer: 0-based index in the whole model.
            first: index in the layer of the first of this rank's heads.
            gate_sum_h: sum over tokens of the gate of this rank's heads.
            tokens: how many tokens it is the sum of.
            routed_H: the heads that the balance loss evens out, bool.
            receiver: called with the layer's importance [H] when the step has ended.

        Raises:
            RuntimeError: another module has recorded as this layer in the running step.
        """
        if self._receivers.setdefault(layer, receiver) != receiver:
            raise RuntimeError(
                f"two modules record statistics as layer {layer}: models that train in one process "
                "need a MegasinkTransformerConfig each, for the statistics are the config's"
            )
        row = self._row(layer, gate_sum_h.device)
        row[first : first + len(gate_sum_h)] += gate_sum_h.detach()
        if first == 0:  # every tensor-parallel rank has these
            row[self.heads : 2 * self.heads] += routed_H
            row[2 * self.heads] += tokens
            row[2 * self.heads + 2] += 1

    def record_loss(self, layer: int, first: int, loss: Tensor) -> None:
        """Add the layer's term of the balance loss in one microbatch that was recorded."""
        if first == 0:
            self._row(layer, loss.device)[2 * self.heads + 1] += loss.detach()

    def add(self, name: str, layer: int, first: int, sum_h: Tensor, weight: float) -> None:
        """Add to a series, on a step that is observed; every rank adds its part of the mean.

        Args:
            name: of `SERIES`.
            layer: 0-based index in the whole model.
            first: index in the layer of the first of these heads.
            sum_h: sum over what the mean is of; whatever other ranks add to the same head counts
                together with it.
            weight: how many it is the sum of.
        """
        at = 2 * self.heads + 3 + 2 * self.heads * SERIES.index(name) + first
        row = self._row(layer, sum_h.device)
        row[at : at + len(sum_h)] += sum_h.detach()
        row[at + self.heads : at + self.heads + len(sum_h)] += weight

    def _row(self, layer: int, device: torch.device) -> Tensor:
        if self._table is None:
            width = 2 * self.heads + 3 + (2 * self.heads * len(SERIES) if self.observes else 0)
            # float64: sums over thousands of microbatches must not lose digits.
            self._table = torch.zeros(self.layers, width, dtype=torch.float64, device=device)
        return self._table[layer]

    def start_reduction(self) -> None:
        """Send the sums of the step; call it on every rank when the backward pass has ended.

        A forward and backward pass that is run again replaces what the first one sent.
        """
        if self._pending is not None:
            self._pending[1].wait()
        self._row(0, torch.device("cuda"))  # a stage without layers sends zeros
        table, self._table = self._table, None
        assert table is not None
        self._pending = table, torch.distributed.all_reduce(table, async_op=True)

    def finish_step(self, coeff: float, scope: str) -> HeadStatistics | None:
        """The statistics of the step, to every layer's receiver too.

        Args:
            coeff: of the balance loss.
            scope: of the balance loss.

        Returns:
            None if nothing was sent.
        """
        if self._pending is None:
            return None
        table, work = self._pending
        self._pending = None
        work.wait()
        heads = self.heads
        table, further = table[:, : 2 * heads + 3], table[:, 2 * heads + 3 :]
        importance_LH = (table[:, :heads] / table[:, -3:-2]).float()
        if scope == "global":
            routed_LH = table[:, heads:-3] > 0
            loss = head_balance_loss(importance_LH.nan_to_num(), coeff, routed_LH)
        else:
            loss = coeff * (table[:, -2] / table[:, -1].clamp_min(1)).sum()
        for layer, receive in self._receivers.items():
            receive(importance_LH[layer])
        self._receivers.clear()
        imbalance_L = layer_imbalance(importance_LH)
        series = {}
        if further.shape[1]:
            sums, weights = further.unflatten(1, (len(SERIES), 2, heads)).unbind(2)
            means = (sums / weights).float()
            series = {name: means[:, index] for index, name in enumerate(SERIES)}
        return HeadStatistics(importance_LH, imbalance_L, imbalance_L.nanmean(), loss, series)
