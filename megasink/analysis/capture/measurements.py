"""Measurements of some samples, and how the shards of an analysis merge.

All measurements go through shards, whether one process runs them, several share them or a killed
analysis resumes. Sums run over the shards in the order of their numbers, so the result does not
depend on which process measured a shard, nor when.

Shapes: N samples, L layers, H heads (maximum over layers), K key positions, P token positions,
S = 2 L + 1 states of the residual stream, E hidden size, B bins.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasink.analysis.capture.inputs import shown
from megasink.analysis.metrics.inputs import FACTS
from megasink.analysis.metrics.states import mean_cosine
from megasink.analysis.results import NonFinite
from megasink.analysis.stored import read_arrays, write_arrays
from megasink.analysis.values import AnalysisValues

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
"""Fact that a metric may take -> field name."""
_SUMS = ("unit_sum_SPE", "count_SP", "gate_histogram_LB")


@dataclass
class ShardMeasurements:
    """Metrics of some samples, and their sums."""

    # values, samples, gate_histogram_LB: as in `Measurements`.
    values: dict[str, Floats]
    samples: list[MeasuredSample]
    # unit_sum_SPE, count_SP: sums of `MeanCosine`, by state; E is 0 if no state was seen.
    unit_sum_SPE: Floats
    count_SP: Ints
    gate_histogram_LB: Ints
    non_finite: list[NonFinite]  # samples left out of everything above

    def save(self, path: Path, of: str) -> None:
        """Write the shard `of` an analysis (`megasink.analysis.stored`)."""
        arrays = {f"value/{name}": array for name, array in self.values.items()}
        lists = {
            "samples": [asdict(sample) for sample in self.samples],
            "non_finite": [asdict(entry) for entry in self.non_finite],
        }
        arrays |= {name: getattr(self, name) for name in _SUMS}
        write_arrays(path, arrays | {"lists": np.asarray(json.dumps(lists))}, of)

    @classmethod
    def load(cls, path: Path, of: str) -> "ShardMeasurements":
        """Read a shard written by `save`."""
        arrays = read_arrays(path, "delete it, and its samples will run again", of)
        lists = json.loads(str(arrays.pop("lists")))
        return cls(
            samples=[MeasuredSample(**sample) for sample in lists["samples"]],
            non_finite=[NonFinite(**entry) for entry in lists["non_finite"]],
            **{name: arrays.pop(name) for name in _SUMS},
            values={name.removeprefix("value/"): array for name, array in arrays.items()},
        )


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
        """Return every metric, derived ones included, over all samples `shown` or one dataset.

        The seed sets the random baseline.
        """
        chosen = self.shown()
        if dataset is not None:
            chosen = [i for i, sample in enumerate(self.samples) if sample.dataset == dataset]
        return self._values(seed, chosen, is_all=dataset is None)

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
        for fact, name in _FACTS.items():
            known = [getattr(self.samples[i], name) for i in chosen]
            if known and None not in known:
                facts[fact] = torch.tensor(known, dtype=torch.float64)
        if is_all:
            facts["cosine_SP"] = torch.from_numpy(self.cosine_SP)
        values = {name: torch.from_numpy(array[chosen]) for name, array in self.values.items()}
        return AnalysisValues(values, facts)


def merge_shards(shards: Iterable[ShardMeasurements], heads: Sequence[int]) -> Measurements:
    """Merge all shards in the order of their numbers; only one is in memory beside the result."""
    values: dict[str, list[Floats]] = {}
    samples: list[MeasuredSample] = []
    non_finite: list[NonFinite] = []
    sums: list[Any] = []
    for shard in shards:
        for name, array in shard.values.items():
            values.setdefault(name, []).append(array)
        samples += shard.samples
        non_finite += shard.non_finite
        addends = (shard.unit_sum_SPE, shard.count_SP, shard.gate_histogram_LB)
        if not sums:
            sums = [addend.copy() for addend in addends]
            continue
        if not sums[0].shape[-1]:  # so far every state was infinite or NaN
            sums[0] = np.zeros_like(shard.unit_sum_SPE)
        for total, addend in zip(sums, addends, strict=True):
            if addend.shape[-1]:
                total += addend
    order = sorted(range(len(samples)), key=lambda i: samples[i].index)
    merged = {name: np.concatenate(values.pop(name))[order] for name in list(values)}
    unit_sum_SPE, count_SP, histogram_LB = sums
    return Measurements(
        merged,
        [samples[i] for i in order],
        mean_cosine(torch.from_numpy(unit_sum_SPE), torch.from_numpy(count_SP)).numpy(),
        histogram_LB,
        list(heads),
        sorted(non_finite, key=lambda entry: entry.sample),
    )
