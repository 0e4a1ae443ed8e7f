"""Apply the metrics to a probe's statistics, sample by sample, and keep their values.

Shapes: L layers, H heads (maximum over layers), K key positions, P token positions, T tokens,
E hidden size.
"""

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.analysis.capture.base import Listener
from megasink.analysis.capture.measurements import Floats, MeasuredSample, shard_of
from megasink.analysis.metrics import Metric
from megasink.analysis.metrics.importance import BINS, gate_histogram
from megasink.analysis.metrics.registry import measured
from megasink.analysis.metrics.states import MeanCosine
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.results import NonFinite

DIRECTIONS = 16
"""Positions whose cosine across inputs is measured."""


class Recorder(Listener):
    """Listener that computes the metrics; without `names`, all but those that take a backward pass.

    Keeps the metric values, 8 bytes each, of every sample since the last `take`: with n_a metrics
    on the axis a, P positions and K columns, a sample takes 8 (H L (n_head + K n_column) + L
    (n_layer + P n_layer_pos) + (2 L + 1) (n_state + P n_state_pos)) bytes, whatever its length.
    Also keeps the sums of `MeanCosine`, (2 L + 1) E `DIRECTIONS` numbers, however many samples.
    """

    def __init__(
        self,
        heads: list[int],
        names: Iterable[str] | None = None,
        options: AnalysisOptions | None = None,
    ):
        options = AnalysisOptions() if options is None else options
        self.heads, positions = heads, options.positions
        self.metrics: dict[str, Metric] = measured(names, options.metrics)
        self.needs = {need for entry in self.metrics.values() for need in entry.needs}
        layers, most = len(heads), max(heads, default=0)
        self._shapes = {
            "head": (layers, most),
            "head column": (layers, most, options.columns),
            "layer": (layers,),
            "layer position": (layers, positions),
            "state": (2 * layers + 1,),
            "state position": (2 * layers + 1, positions),
        }
        self._batch: dict[str, Floats] = {}
        self._bad: list[tuple[set[int], set[int]]] = []
        self._states: list[dict[int, Tensor]] = []
        self._gates: list[dict[int, Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        layers = len(self.heads)
        self._batches: dict[str, list[Floats]] = {name: [] for name in self.metrics}
        self._samples: list[MeasuredSample] = []
        self._non_finite: list[NonFinite] = []
        self._cosine = MeanCosine(2 * layers + 1, DIRECTIONS)
        self._histogram = np.zeros((layers, BINS), dtype=np.int64)

    def begin(self, samples: int) -> None:
        """Start a batch of `samples` sequences."""
        self._batch = {
            name: np.full((samples, *self._shapes[entry.axis]), np.nan)
            for name, entry in self.metrics.items()
        }
        self._bad = [(set(), set()) for _ in range(samples)]
        self._states = [{} for _ in range(samples)]
        self._gates = [{} for _ in range(samples)]

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        self._apply(sample, layer, statistics)
        if "explicit_gate_HTX" in statistics:
            self._gates[sample][layer] = gate_histogram(statistics["explicit_gate_HTX"]).cpu()

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        self._apply(sample, half, {"state_TE": state_TE})
        # Kept until the sample is known to be finite in every layer.
        self._states[sample][half] = state_TE[:DIRECTIONS].clone()

    def _apply(self, sample: int, index: int, statistics: dict[str, Tensor]) -> None:
        known = statistics.keys()
        for name, entry in self.metrics.items():
            if not set(entry.needs) <= known:
                continue
            value = entry.compute(**{need: statistics[need] for need in entry.needs})
            array = value.to("cpu", torch.float64).numpy()
            room = self._batch[name][sample, index]
            if entry.axis in ("head", "layer", "state") and not np.isfinite(array).all():
                layers, heads = self._bad[sample]
                # Block l makes states 2 l + 1 and 2 l + 2; block 0 reads state 0.
                layers.add(max(index - 1, 0) // 2 if entry.axis == "state" else index)
                if entry.axis == "head" and index == min(layers):
                    heads.update(np.flatnonzero(~np.isfinite(array)).tolist())
            if room.ndim == 0:
                self._batch[name][sample, index] = array
            else:
                cut = tuple(slice(min(a, b)) for a, b in zip(array.shape, room.shape, strict=True))
                room[cut] = array[cut]

    def end(self, samples: list[MeasuredSample], about: Collection[str] | None = None) -> None:
        """Finish a batch; sums over samples take the datasets in `about` (None: all)."""
        for sample, (layers, heads) in zip(samples, self._bad, strict=True):
            if layers:
                entry = NonFinite(sample.index, sample.source, sorted(layers), sorted(heads))
                self._non_finite.append(entry)
        good = [i for i, (layers, _) in enumerate(self._bad) if not layers]
        for name, array in self._batch.items():
            self._batches[name].append(array[good])
        for i in (i for i in good if about is None or samples[i].dataset in about):
            for half, state_PE in self._states[i].items():
                self._cosine.add(half, state_PE)
            for layer, counts_B in self._gates[i].items():
                self._histogram[layer] += counts_B.numpy()
        self._samples += [samples[i] for i in good]
        self._batch, self._states, self._gates = {}, [], []

    def take(self) -> dict[str, NDArray[Any]]:
        """Return a shard (`shard_of`) of everything since the last call, and clear it."""
        values = {
            name: np.concatenate([np.empty((0, *self._shapes[entry.axis])), *self._batches[name]])
            for name, entry in self.metrics.items()
        }
        sums = {
            "unit_sum_SPE": self._cosine.unit_sum_SPE.numpy(),
            "count_SP": self._cosine.count_SP.numpy(),
            "gate_histogram_LB": self._histogram,
        }
        shard = shard_of(values, self._samples, sums, self._non_finite)
        self._clear()
        return shard
