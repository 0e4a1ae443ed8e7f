"""Gate sums of every head over the microbatches of a step, reduced over ranks at its end.

Shapes: L layers of the model, H query heads, h those of this tensor-parallel rank.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.loss import head_balance_gradient, head_balance_loss, layer_imbalance

# Series that layers may record on observed steps: the sink logit; the mean of an explicit gate that
# is not the importance; the gradients of the balance loss and of the rest of the loss with respect
# to a bias on the logit of the gate (docs/observing.md).
SINK, GATE, BALANCE_GRADIENT, OTHER_GRADIENT = SERIES = (
    "sink",
    "gate",
    "balance gradient",
    "other gradient",
)


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one step over the global batch, on the device: reading one synchronizes.

    Attributes:
        importance_LH: Mean gate of each head over all tokens (P0.10), float32, NaN for a layer
            that recorded nothing.
        imbalance_L: CV of each layer (P0.13).
        imbalance: Mean CV over layers (Eq. 6), a scalar.
        balance_loss: Eq. 7 or 8, a scalar: computed from `importance_LH` in the global scope (whose
            gradient uses the previous step), else the mean over microbatches.
        series: On an observed step, the mean of each of `SERIES`, [L, H] float32, NaN where nothing
            was recorded.
    """

    importance_LH: Tensor
    imbalance_L: Tensor
    imbalance: Tensor
    balance_loss: Tensor
    series: dict[str, Tensor] = field(default_factory=dict)


Receiver = Callable[[Tensor, Tensor], None]


class HeadSums:
    """Accumulates the sums of one model's layers on the device until the step ends.

    The sums live in a single [L, 2 H + 3] tensor that is all-reduced once per step. On an observed
    step it has 2 H more columns for each of `SERIES`.
    """

    def __init__(self, layers: int, heads: int, group: ProcessGroup | None = None):
        self.layers, self.heads, self.group = layers, heads, group
        self.observes = False  # set on every rank before the first microbatch of a step
        self.microbatches: Counter[int] = Counter()  # of the step, recorded by layers of this rank
        self.ran_backward = False  # whether the backward pass of one of them has come to a layer
        # Per layer: a sum per head, whether each head was routed, then tokens, balance loss at
        # coefficient 1, microbatches; for each series a sum and a weight per head.
        self._table: Tensor | None = None
        # Layer -> tokens and microbatches of the step, which the host knows.
        self._counts: dict[int, tuple[int, int]] = {}
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
        """Add one microbatch of one layer."""
        if self._receivers.setdefault(layer, receiver) != receiver:
            raise RuntimeError(
                f"two modules record statistics as layer {layer}: give each model of a process "
                "its own MegasinkTransformerConfig, which holds the statistics"
            )
        self.microbatches[layer] += 1
        row = self._row(layer, gate_sum_h.device)
        # Not +=, which would then copy the sum onto itself.
        row[first : first + len(gate_sum_h)].add_(gate_sum_h.detach())
        if first == 0:  # the same on every tensor-parallel rank
            if layer not in self._counts:
                own = len(routed_H)
                row[self.heads : self.heads + own].add_(routed_H)
                if own < self.heads:
                    row[own : self.heads] = torch.nan
            before, _ = self._counts.get(layer, (0, 0))
            self._counts[layer] = before + tokens, self.microbatches[layer]

    def record_loss(self, layer: int, first: int, loss: Tensor) -> None:
        """Add the layer's balance loss for one recorded microbatch."""
        if first == 0:
            self._row(layer, loss.device)[2 * self.heads + 1] += loss.detach()

    def add(self, name: str, layer: int, first: int, sum_h: Tensor, weight: float) -> None:
        """Add the sum of `weight` values to a series of `SERIES`; every rank adds its part."""
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

    def _take_table(self) -> Tensor | None:
        """Return the sums since the last call with their counts; None if there are none."""
        table, self._table = self._table, None
        counts, self._counts = self._counts, {}
        self.microbatches.clear()
        self.ran_backward = False
        if table is not None:
            # Adjoining layers mostly have the same counts: two launches for all of them.
            placed = enumerate(sorted(counts.items()))
            for (_, same), run in groupby(placed, lambda at: (at[1][0] - at[0], at[1][1])):
                layers = [layer for _, (layer, _) in run]
                rows = table[layers[0] : layers[-1] + 1]
                rows[:, 2 * self.heads], rows[:, 2 * self.heads + 2] = same
        return table

    def start_reduction(self) -> None:
        """Start the all-reduce of the step, on every rank; sums of a rerun replace the first's."""
        self._wait()
        self._row(0, torch.device("cuda"))  # a stage without layers sends zeros
        table, work = self._take_table(), None
        assert table is not None
        if torch.distributed.is_initialized():  # a Trainer in one process has no process group
            work = torch.distributed.all_reduce(table, group=self.group, async_op=True)
        self._pending = table, work

    def discard(self) -> None:
        """Drop the sums of the step, reduced or not."""
        self._wait()
        self._take_table()
        self._pending = None
        self._receivers.clear()

    def _wait(self) -> None:
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].wait()

    def finish_step(self, coeff: float, scope: str) -> HeadStatistics:
        """Return the statistics of the step that was reduced; every receiver gets its layer's."""
        assert self._pending is not None
        self._wait()
        table, self._pending = self._pending[0], None
        heads = self.heads
        table, further = table[:, : 2 * heads + 3], table[:, 2 * heads + 3 :]
        importance_LH = (table[:, :heads] / table[:, -3:-2]).float()
        routed_LH = table[:, heads:-3] > 0
        if scope == "global":
            loss = head_balance_loss(importance_LH.nan_to_num(), coeff, routed_LH)
        else:
            loss = coeff * (table[:, -2] / table[:, -1].clamp_min(1)).sum()
        gradient_LH = head_balance_gradient(importance_LH, 1.0, routed_LH)
        for layer, receive in self._receivers.items():
            receive(importance_LH[layer], gradient_LH[layer])
        self._receivers.clear()
        imbalance_L = layer_imbalance(importance_LH)
        series = {}
        if further.shape[1]:
            sums, weights = further.unflatten(1, (len(SERIES), 2, heads)).unbind(2)
            means = (sums / weights).float()
            series = {name: means[:, index] for index, name in enumerate(SERIES)}
        return HeadStatistics(importance_LH, imbalance_L, imbalance_L.nanmean(), loss, series)
