"""What was measured of some samples, and how the shards of an analysis add up.

Whatever is measured goes through shards, whether one process measures all of it, several share it
or a killed one goes on: sums are taken over the shards in the order of their numbers, so that the
result does not depend on who measured which shard, nor when.

Shapes: N samples, L layers, H heads (the most of any layer), K key positions, P token positions,
S = 2 L + 1 states of the residual stream, E hidden size, B bins.
"""

import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasink.diagnostics.analysis_values import AnalysisValues
from megasink.diagnostics.registry import FACTS
from megasink.diagnostics.results import NonFinite
from megasink.diagnostics.states import mean_cosine
from megasink.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class MeasuredSample:
    """What is remembered of a sample.

    Attributes:
        index: among all samples, in their order.
        source, dataset: where it came from.
        tokens: that ran.
        nats, targets: summed loss, and the tokens that it is over; None where it was not computed.
        bytes, nats_of_bytes: bytes of text of the targets, and the loss of those that have any;
            None for a tokenizer whose tokens are no bytes.
    """

    index: int
    source: str
    dataset: str
    tokens: int
    nats: float | None = None
    targets: int | None = None
    bytes: int | None = None
    nats_of_bytes: float | None = None


_FACTS = {f"{f.name}_N": f.name for f in fields(MeasuredSample) if f"{f.name}_N" in FACTS}
"""Fact that a metric may take -> the field."""


@dataclass
class ShardMeasurements:
    """The metrics of some samples, and their sums.

    Attributes:
        values, samples, gate_histogram_LB: as in `Measurements`.
        unit_sum_SPE, count_SP: of `MeanCosine`, by state; E is 0 where no state was seen.
        non_finite: samples that were left out of everything above.
    """

    values: dict[str, Floats]
    samples: list[MeasuredSample]
    unit_sum_SPE: Floats
    count_SP: Ints
    gate_histogram_LB: Ints
    non_finite: list[NonFinite]

    def save(self, path: Path) -> None:
        """Write the shard as a whole, or not at all; nothing in it is a pickle.

        Raises:
            OSError: no room, no right.
        """
        arrays = {f"value/{name}": array for name, array in self.values.items()}
        lists = {
            "samples": [asdict(sample) for sample in self.samples],
            "non_finite": [asdict(entry) for entry in self.non_finite],
        }
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                unit_sum_SPE=self.unit_sum_SPE,
                count_SP=self.count_SP,
                gate_histogram_LB=self.gate_histogram_LB,
                lists=np.asarray(json.dumps(lists)),
                **arrays,
            )
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "ShardMeasurements":
        """Read what `save` wrote.

        Raises:
            UserError: it is broken.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                lists = json.loads(str(arrays["lists"]))
                return cls(
                    {
                        name.removeprefix("value/"): arrays[name]
                        for name in arrays.files
                        if name.startswith("value/")
                    },
                    [MeasuredSample(**sample) for sample in lists["samples"]],
                    arrays["unit_sum_SPE"],
                    arrays["count_SP"],
                    arrays["gate_histogram_LB"],
                    [NonFinite(**entry) for entry in lists["non_finite"]],
                )
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path} cannot be read ({error}): delete it, and its samples run again"
            ) from error


@dataclass
class Measurements:
    """The metrics of the samples of one model.

    Attributes:
        values: metric of statistics -> float64 [N, ...] along its axis (`diagnostics.AXES`), NaN
            where a layer, head or position does not exist.
        samples: in the order of their index.
        cosine_SP: mean cosine across inputs by state and position (P4.5).
        gate_histogram_LB: counts of explicit gate scores in `BINS` bins over [0, 1].
        heads: of each layer.
        non_finite: samples that were left out.
    """

    values: dict[str, Floats]
    samples: list[MeasuredSample]
    cosine_SP: Floats
    gate_histogram_LB: Ints
    heads: list[int]
    non_finite: list[NonFinite] = field(default_factory=list)

    def analysis_values(self, seed: int, dataset: str | None = None) -> AnalysisValues:
        """Every metric, derived ones too, over all samples or those of one data set.

        Args:
            seed: of the random baseline.
        """
        chosen = [i for i, sample in enumerate(self.samples) if dataset in (None, sample.dataset)]
        facts: dict[str, Any] = {"seed": seed}
        for fact, name in _FACTS.items():
            known = [getattr(self.samples[i], name) for i in chosen]
            if known and None not in known:
                facts[fact] = torch.tensor(known, dtype=torch.float64)
        if dataset is None:
            facts["cosine_SP"] = torch.from_numpy(self.cosine_SP)
        values = {name: torch.from_numpy(array[chosen]) for name, array in self.values.items()}
        return AnalysisValues(values, facts)


def merge_shards(shards: Iterable[ShardMeasurements], heads: Sequence[int]) -> Measurements:
    """All shards merged, samples in the order of their index.

    Holds what is kept of every sample once, and one shard beside it.

    Args:
        shards: in the order of their numbers, which is the order of the sums; at least one.
    """
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
    merged = {}
    for name in list(values):
        merged[name] = np.concatenate(values.pop(name))[order]
    unit_sum_SPE, count_SP, histogram_LB = sums
    return Measurements(
        merged,
        [samples[i] for i in order],
        mean_cosine(torch.from_numpy(unit_sum_SPE), torch.from_numpy(count_SP)).numpy(),
        histogram_LB,
        list(heads),
        sorted(non_finite, key=lambda entry: entry.sample),
    )
