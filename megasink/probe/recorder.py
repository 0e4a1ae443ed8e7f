"""Applies the metrics to what a probe hands over, sample by sample, and keeps their values.

Shapes: N samples, L layers, H heads (the most of any layer), K key positions, P token positions,
T tokens, E hidden size.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.diagnostics import Metric, metrics
from megasink.diagnostics.importance import BINS, gate_histogram
from megasink.diagnostics.states import MeanCosine

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NonFinite:
    """A sample with values that are no numbers: it is in no average.

    Attributes:
        sample: its index; source: where it came from.
        layers: the layers, or halves of the residual stream, concerned; heads: of the first one.
    """

    sample: int
    source: str
    layers: list[int]
    heads: list[int]


@dataclass
class Captured:
    """The metrics of some samples of one model.

    Attributes:
        values: metric -> float64, NaN where a layer, head or position does not exist:
            "head" [N, L, H], "head column" [N, L, H, K], "layer" [N, L], "layer position"
            [N, L, P], "state" [N, 2 L + 1], "state position" [N, 2 L + 1, P].
        samples: one dictionary each: tokens, and what `Recorder.end` was given.
        cosine_SP: mean cosine across inputs by state and position (P4.5).
        gate_histogram_LB: counts of explicit gate scores in `BINS` bins over [0, 1].
        heads: of each layer.
        non_finite: samples that were left out.
    """

    values: dict[str, Floats]
    samples: list[dict[str, Any]]
    cosine_SP: Floats
    gate_histogram_LB: NDArray[np.int64]
    heads: list[int]
    non_finite: list[NonFinite] = field(default_factory=list)

    def of(self, name: str) -> Tensor:
        """A metric as a tensor."""
        return torch.from_numpy(self.values[name])


class Recorder:
    """The observer of a probe.

    Args:
        heads: of each layer, 0 for one without attention.
        names: of the metrics; None for all.
        positions: P, how many token positions the curves have.
        columns: K, for how many keys alpha is kept.
        directions: positions whose cosine across inputs is measured.

    Attributes:
        needs: the statistics to capture.
    """

    def __init__(
        self,
        heads: list[int],
        names: Iterable[str] | None = None,
        *,
        positions: int = 64,
        columns: int = 8,
        directions: int = 16,
    ):
        self.heads = heads
        self.metrics: dict[str, Metric] = metrics(names)
        self.needs = {need for entry in self.metrics.values() for need in entry.needs}
        layers, most = len(heads), max(heads, default=0)
        self._shapes = {
            "head": (layers, most),
            "head column": (layers, most, columns),
            "layer": (layers,),
            "layer position": (layers, positions),
            "state": (2 * layers + 1,),
            "state position": (2 * layers + 1, positions),
        }
        self._parts: dict[str, list[Floats]] = {name: [] for name in self.metrics}
        self._batch: dict[str, Floats] = {}
        self._bad: list[tuple[set[int], set[int]]] = []
        self._samples: list[dict[str, Any]] = []
        self._non_finite: list[NonFinite] = []
        self._cosines = [MeanCosine(directions) for _ in range(2 * layers + 1)]
        self._histogram = np.zeros((layers, BINS), dtype=np.int64)
        self._count = 0

    def begin(self, samples: int) -> None:
        """A batch of so many sequences follows."""
        self._batch = {
            name: np.full((samples, *self._shapes[entry.axis]), np.nan)
            for name, entry in self.metrics.items()
        }
        self._bad = [(set(), set()) for _ in range(samples)]

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        """See `Observer.layer`."""
        self._apply(sample, layer, statistics)
        if "explicit_gate_HTX" in statistics:
            self._histogram[layer] += gate_histogram(statistics["explicit_gate_HTX"]).cpu().numpy()

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        """See `Observer.state`."""
        self._apply(sample, half, {"state_TE": state_TE})
        if bool(state_TE.isfinite().all()):
            self._cosines[half].add(state_TE)

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
                layers.add(index)
                if entry.axis == "head" and index == min(layers):
                    heads.update(np.flatnonzero(~np.isfinite(array)).tolist())
            if room.ndim == 0:
                self._batch[name][sample, index] = array
            else:
                cut = tuple(slice(min(a, b)) for a, b in zip(array.shape, room.shape, strict=True))
                room[cut] = array[cut]

    def end(self, samples: list[dict[str, Any]]) -> None:
        """The batch has run.

        Args:
            samples: what to remember of each sequence, "source" among it.
        """
        for index, (sample, (layers, heads)) in enumerate(zip(samples, self._bad, strict=True)):
            if layers:
                self._non_finite.append(
                    NonFinite(
                        sample.get("index", self._count + index),
                        str(sample["source"]),
                        sorted(layers),
                        sorted(heads),
                    )
                )
        good = [i for i, (layers, _) in enumerate(self._bad) if not layers]
        for name, array in self._batch.items():
            self._parts[name].append(array[good])
        self._samples += [samples[i] for i in good]
        self._count += len(samples)
        self._batch = {}

    def result(self) -> Captured:
        """Everything so far."""
        values = {
            name: np.concatenate(parts) if parts else np.empty((0, *self._shapes[entry.axis]))
            for (name, entry), parts in zip(self.metrics.items(), self._parts.values(), strict=True)
        }
        return Captured(
            values,
            list(self._samples),
            np.stack([cosine.result().numpy() for cosine in self._cosines]),
            self._histogram.copy(),
            self.heads,
            list(self._non_finite),
        )
