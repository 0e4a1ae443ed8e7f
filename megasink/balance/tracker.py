"""Sums of every head's gate over the microbatches of a step, and over ranks when it ends.

Shapes: L layers of the model, H query heads, h those of this tensor-parallel rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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
    """Sums per layer, on the device, until the step ends. One per process.

    One all-reduce of one [L, 2 H + 3] tensor per step, whatever the layers, stages and
    microbatches. It starts when the backward pass ends and is awaited after the optimizer's step.
    On a step that is observed the tensor has 2 H further columns for each of `SERIES`.

    Attributes:
        observes: the running step is observed; the same on every rank.
    """

    observes: ClassVar[bool] = False

    # Of each layer: a sum per head, then tokens, balance loss at coefficient 1, microbatches.
    _rows: ClassVar[dict[int, Tensor]] = {}
    _layers: ClassVar[dict[int, tuple[Tensor, Receiver]]] = {}
    _pending: ClassVar[tuple[Tensor, Any, int] | None] = None
    # (name, layer) -> (first head, sums over [heads of this rank], their weight).
    _series: ClassVar[dict[tuple[str, int], tuple[int, Tensor, float]]] = {}

    @classmethod
    def record(
        cls, layer: int, gate_sum_h: Tensor, tokens: int, routed_H: Tensor, receiver: Receiver
    ) -> None:
        """Add one microbatch of one layer.

        Args:
            layer: 0-based index in the whole model.
            gate_sum_h: sum over tokens of the gate of this rank's heads.
            tokens: how many tokens it is the sum of.
            routed_H: the heads that the balance loss evens out, bool.
            receiver: called with the layer's importance [H] when the step has ended.
        """
        row = cls._rows.get(layer)
        if row is None:
            # float64: sums over thousands of microbatches must not lose digits.
            row = gate_sum_h.new_zeros(len(gate_sum_h) + 3, dtype=torch.float64)
            cls._rows[layer] = row
        row[:-3] += gate_sum_h.detach()
        row[-3] += tokens
        row[-1] += 1
        cls._layers[layer] = (routed_H, receiver)

    @classmethod
    def record_loss(cls, layer: int, loss: Tensor) -> None:
        """Add the layer's term of the balance loss in one microbatch that was recorded."""
        cls._rows[layer][-2] += loss.detach()

    @classmethod
    def add(cls, name: str, layer: int, first: int, sum_h: Tensor, weight: float) -> None:
        """Add to a series, on a step that is observed; every rank adds its part of the mean.

        Args:
            name: of `SERIES`.
            layer: 0-based index in the whole model.
            first: index in the layer of the first of these heads.
            sum_h: sum over what the mean is of; whatever other ranks add to the same head counts
                together with it.
            weight: how many it is the sum of.
        """
        sum_h = sum_h.detach().double()
        if (name, layer) in cls._series:
            _, before_h, weight_before = cls._series[name, layer]
            sum_h, weight = before_h + sum_h, weight_before + weight
        cls._series[name, layer] = first, sum_h, weight

    @classmethod
    def start_reduction(cls, layers: int, heads: int, tp_group: ProcessGroup) -> None:
        """Send the sums of the step; call it on every rank when the backward pass has ended.

        A forward and backward pass that is run again replaces what the first one sent.
        """
        if cls._pending is not None:
            cls._pending[1].wait()
        device = next(iter(cls._rows.values())).device if cls._rows else torch.device("cuda")
        width = 2 * heads + 3
        whole = width + (2 * heads * len(SERIES) if cls.observes else 0)
        table = torch.zeros(layers, whole, dtype=torch.float64, device=device)
        for layer, row in cls._rows.items():
            own = len(row) - 3
            table[layer].narrow(0, tp_group.rank() * own, own).copy_(row[:-3])
            if tp_group.rank() == 0:  # every tensor-parallel rank has these
                table[layer, heads : 2 * heads] = cls._layers[layer][0].double() * row[-1]
                table[layer, 2 * heads : width] = row[-3:]
        for (name, layer), (first, sum_h, weight) in cls._series.items():
            at = width + 2 * heads * SERIES.index(name) + first
            table[layer, at : at + len(sum_h)] = sum_h
            table[layer, at + heads : at + heads + len(sum_h)] = weight
        cls._rows.clear()
        cls._series.clear()
        cls._pending = table, torch.distributed.all_reduce(table, async_op=True), heads

    @classmethod
    def finish_step(cls, coeff: float, scope: str) -> HeadStatistics | None:
        """The statistics of the step, to every layer's receiver too.

        Args:
            coeff: of the balance loss.
            scope: of the balance loss.

        Returns:
            None if nothing was sent.
        """
        if cls._pending is None:
            return None
        table, work, heads = cls._pending
        cls._pending = None
        work.wait()
        table, further = table[:, : 2 * heads + 3], table[:, 2 * heads + 3 :]
        importance_LH = (table[:, :heads] / table[:, -3:-2]).float()
        if scope == "global":
            routed_LH = table[:, heads:-3] > 0
            loss = head_balance_loss(importance_LH.nan_to_num(), coeff, routed_LH)
        else:
            loss = coeff * (table[:, -2] / table[:, -1].clamp_min(1)).sum()
        for layer, (_, receive) in cls._layers.items():
            receive(importance_LH[layer])
        cls._layers.clear()
        imbalance_L = layer_imbalance(importance_LH)
        series = {}
        if further.shape[1]:
            sums, weights = further.unflatten(1, (len(SERIES), 2, heads)).unbind(2)
            means = (sums / weights).float()
            series = {name: means[:, index] for index, name in enumerate(SERIES)}
        return HeadStatistics(importance_LH, imbalance_L, imbalance_L.nanmean(), loss, series)

    @classmethod
    def forget(cls) -> None:
        """Drop everything, as in a new process."""
        cls._rows.clear()
        cls._layers.clear()
        cls._series.clear()
        cls._pending = None
        cls.observes = False
