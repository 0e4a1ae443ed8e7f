"""The measurements of samples, merged from shards.

Sums run over the shards in the order of their numbers, so the result does not depend on which
process measured a shard, nor when.

Shapes: N samples, L layers, H heads (maximum over layers), K key positions, P token positions,
S = 2 L + 1 states of the residual stream, E hidden size, B bins.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.analysis.capture.input_samples import shown
from megasink.analysis.metrics.registry import FACTS, OVER_SAMPLES, Metric, metrics, parameter_names
from megasink.analysis.metrics.residual_stream import mean_cosine
from megasink.analysis.result_schemas import NonFinite

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MeasuredSample:
    """Record of one sample."""

    index: int  # among all samples, in their order
    # source, dataset: where it came from.
    source: str
    dataset: str
    tokens: int  # number of tokens run
    # nats, targets: summed loss and its number of targets; None if not computed.
    nats: float | None = None
    targets: int | None = None
    # bytes, nats_of_bytes: bytes of text of the targets, and the loss of those that have any; None
    # for a tokenizer whose tokens do not map to bytes.
    bytes: int | None = None
    nats_of_bytes: float | None = None


_FACTS = {f"{f.name}_N": f.name for f in fields(MeasuredSample) if f"{f.name}_N" in FACTS}
"""Parameter of a metric, one of `FACTS` -> field name."""


class AnalysisValues:
    """Computes every metric whose inputs were measured; the others are left out."""

    def __init__(self, values: Mapping[str, Tensor], facts: Mapping[str, Any]):
        # metric -> [N, ...], for metrics of statistics and derived metrics by sample.
        self.by_sample = dict(values)
        self.overall: dict[str, Tensor] = {}  # metric -> value of the analysis, if it has numbers
        self._known: dict[str, Any] = {n: fact for n, fact in facts.items() if n in FACTS}
        registered = metrics()
        for name in values:
            self._aggregate(registered[name])
        waiting = [entry for entry in registered.values() if entry.is_derived]
        while ready := [e for e in waiting if set(e.needs) <= self._known.keys()]:
            for entry in ready:
                value = entry.compute(*(self._known[need] for need in entry.needs))
                if entry.over_samples:
                    self.by_sample[entry.name] = value
                    self._aggregate(entry)
                else:
                    self._keep(entry, value)
            waiting = [entry for entry in waiting if entry not in ready]

    def _aggregate(self, entry: Metric) -> None:
        values = self.by_sample[entry.name]
        self._known[parameter_names(entry)[1]] = values
        assert entry.over_samples is not None
        self._keep(entry, OVER_SAMPLES[entry.over_samples](values, self._known["tokens_N"]))

    def _keep(self, entry: Metric, value: Tensor) -> None:
        self._known[parameter_names(entry)[0]] = value
        if bool(value.isfinite().any()):
            self.overall[entry.name] = value

    def spread(self, name: str) -> float | None:
        """Return the standard deviation of a metric over samples; None for fewer than two."""
        entry = metrics()[name]
        if name not in self.overall:
            return None
        needs = [self._known[need] for need in entry.needs]
        values = [entry.compute(*(need[i : i + 1] for need in needs)) for i in range(len(needs[0]))]
        numbers = [n for value in values if isinstance(n := entry.number_of(value), float)]
        return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None


@dataclass
class Measurements:
    """Metrics of the samples of one model."""

    # Metric of statistics -> float64 [N, ...] along its axis (`diagnostics.AXES`), NaN where a
    # layer, head or position does not exist.
    values: dict[str, Floats]
    samples: list[MeasuredSample]  # in index order
    # Mean cosine across inputs by state and position (P4.5), of the samples `shown`.
    cosine_SP: Floats
    gate_histogram_LB: Ints  # counts of their explicit gate scores in `BINS` bins over [0, 1]
    heads: list[int]  # number of heads in each layer
    non_finite: list[NonFinite] = field(default_factory=list)  # samples that were left out

    def shown(self) -> list[int]:
        """Return the indices of the samples that count in the results of the whole analysis."""
        about = shown(sample.dataset for sample in self.samples)
        return [i for i, sample in enumerate(self.samples) if sample.dataset in about]

    def analysis_values(self, seed: int, dataset: str | None = None) -> AnalysisValues:
        """Return every metric, derived ones included, over all samples `shown` or one dataset."""
        if dataset is None:
            return self._values(seed, self.shown(), is_all=True)
        chosen = [i for i, sample in enumerate(self.samples) if sample.dataset == dataset]
        return self._values(seed, chosen, is_all=False)

    def arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        """Return the contents of samples.npz: `AnalysisValues.by_sample`, and sources."""
        about, values = self.shown(), self.analysis_values(seed).by_sample
        if len(about) < len(self.samples):
            every = self._values(seed, range(len(self.samples)), is_all=False).by_sample
            for name, own in values.items():  # the random baseline as the analysis has it
                every[name][about] = own
            values = every
        facts = ("dataset", "tokens", "source")
        return {f"metric/{name}": tensor.numpy() for name, tensor in values.items()} | {
            fact: np.asarray([getattr(sample, fact) for sample in self.samples]) for fact in facts
        }

    def _values(self, seed: int, chosen: Sequence[int], *, is_all: bool) -> AnalysisValues:
        facts: dict[str, Any] = {"seed": seed}
        if is_all:
            facts["cosine_SP"] = torch.from_numpy(self.cosine_SP)
        for fact, name in _FACTS.items():
            known = [getattr(self.samples[i], name) for i in chosen]
            if known and None not in known:
                facts[fact] = torch.tensor(known, dtype=torch.float64)
        values = {name: torch.from_numpy(array[chosen]) for name, array in self.values.items()}
        return AnalysisValues(values, facts)


def merged(shards: Iterable[Mapping[str, NDArray[Any]]], heads: Sequence[int]) -> Measurements:
    """Merge the shards of `Recorder.take` in their order; one is in memory beside the result."""
    values: dict[str, list[Floats]] = {}
    samples: list[MeasuredSample] = []
    non_finite: list[NonFinite] = []
    sums: dict[str, NDArray[Any]] = {}
    for shard in shards:
        lists = json.loads(str(shard["lists"]))
        samples += (MeasuredSample(**sample) for sample in lists["samples"])
        non_finite += (NonFinite(**entry) for entry in lists["non_finite"])
        for name, array in shard.items():
            if name.startswith("value/"):
                values.setdefault(name.removeprefix("value/"), []).append(array)
            elif name != "lists" and array.shape[-1]:  # 0 where every state was infinite or NaN
                known = sums.get(name)
                sums[name] = array + known if known is not None and known.shape[-1] else array
            elif name != "lists":
                sums.setdefault(name, array)
    order = sorted(range(len(samples)), key=lambda i: samples[i].index)
    unit_sum_SPE, count_SP = (torch.from_numpy(sums[n]) for n in ("unit_sum_SPE", "count_SP"))
    return Measurements(
        {name: np.concatenate(values.pop(name))[order] for name in list(values)},
        [samples[i] for i in order],
        mean_cosine(unit_sum_SPE, count_SP).numpy(),
        sums["gate_histogram_LB"],
        list(heads),
        sorted(non_finite, key=lambda entry: entry.sample),
    )
