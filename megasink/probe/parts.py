"""What was measured of some samples, and how parts add up to the whole.

Whatever is measured goes through parts, whether one process measures all of it, several share it or
a killed one goes on: sums are taken over the parts in the order of their numbers, so that the
result does not depend on who measured which part, nor when.

Shapes: N samples, L layers, H heads (the most of any layer), K key positions, P token positions,
S = 2 L + 1 states of the residual stream, E hidden size, B bins.
"""

import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.atomic import atomic_file
from megasink.diagnostics.states import mean_cosine
from megasink.errors import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class NonFinite:
    """A sample with values that are no numbers: it is in no average.

    Attributes:
        sample: its index; source: where it came from.
        layers: the layers concerned; heads: of the first one.
    """

    sample: int
    source: str
    layers: list[int]
    heads: list[int]


@dataclass
class Part:
    """The metrics of some samples, and their sums.

    Attributes:
        values: as in `Captured`.
        samples: one dictionary each, as given to `Recorder.end`.
        unit_sum_SPE, count_SP: of `MeanCosine`, by state; E is 0 where no state was seen.
        gate_histogram_LB: as in `Captured`.
        non_finite: samples that were left out of everything above.
    """

    values: dict[str, Floats]
    samples: list[dict[str, Any]]
    unit_sum_SPE: Floats
    count_SP: Ints
    gate_histogram_LB: Ints
    non_finite: list[NonFinite]

    def save(self, path: Path) -> None:
        """Write the part as a whole, or not at all; nothing in it is a pickle.

        Raises:
            OSError: no room, no right.
        """
        arrays = {f"value/{name}": array for name, array in self.values.items()}
        told = {"samples": self.samples, "non_finite": [asdict(entry) for entry in self.non_finite]}
        with atomic_file(path) as file:
            np.savez(
                file,
                allow_pickle=False,
                unit_sum_SPE=self.unit_sum_SPE,
                count_SP=self.count_SP,
                gate_histogram_LB=self.gate_histogram_LB,
                told=np.asarray(json.dumps(told)),
                **arrays,
            )

    @classmethod
    def load(cls, path: Path) -> "Part":
        """Read what `save` wrote.

        Raises:
            UserError: it is broken.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                told = json.loads(str(arrays["told"]))
                return cls(
                    {
                        name.removeprefix("value/"): arrays[name]
                        for name in arrays.files
                        if name.startswith("value/")
                    },
                    told["samples"],
                    arrays["unit_sum_SPE"],
                    arrays["count_SP"],
                    arrays["gate_histogram_LB"],
                    [NonFinite(**entry) for entry in told["non_finite"]],
                )
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{path} cannot be read ({error}): delete it, and its samples run again"
            ) from error


@dataclass
class Captured:
    """The metrics of some samples of one model.

    Attributes:
        values: metric -> float64, NaN where a layer, head or position does not exist:
            "head" [N, L, H], "head column" [N, L, H, K], "layer" [N, L], "layer position"
            [N, L, P], "state" [N, S], "state position" [N, S, P].
        samples: one dictionary each: tokens, and what `Recorder.end` was given.
        cosine_SP: mean cosine across inputs by state and position (P4.5).
        gate_histogram_LB: counts of explicit gate scores in `BINS` bins over [0, 1].
        heads: of each layer.
        non_finite: samples that were left out.
    """

    values: dict[str, Floats]
    samples: list[dict[str, Any]]
    cosine_SP: Floats
    gate_histogram_LB: Ints
    heads: list[int]
    non_finite: list[NonFinite] = field(default_factory=list)

    def of(self, name: str) -> Tensor:
        """A metric as a tensor."""
        return torch.from_numpy(self.values[name])


def merge(parts: Iterable[Part], heads: Sequence[int]) -> Captured:
    """All parts together, samples in the order of their "index".

    Holds what is kept of every sample once, and one part beside it.

    Args:
        parts: in the order of their numbers, which is the order of the sums; at least one.
    """
    values: dict[str, list[Floats]] = {}
    samples: list[dict[str, Any]] = []
    non_finite: list[NonFinite] = []
    sums: list[Any] = []
    for part in parts:
        for name, array in part.values.items():
            values.setdefault(name, []).append(array)
        samples += part.samples
        non_finite += part.non_finite
        addends = (part.unit_sum_SPE, part.count_SP, part.gate_histogram_LB)
        if not sums:
            sums = [addend.copy() for addend in addends]
            continue
        if not sums[0].shape[-1]:  # so far every state was infinite or NaN
            sums[0] = np.zeros_like(part.unit_sum_SPE)
        for total, addend in zip(sums, addends, strict=True):
            if addend.shape[-1]:
                total += addend
    order = sorted(range(len(samples)), key=lambda i: samples[i]["index"])
    together = {}
    for name in list(values):
        together[name] = np.concatenate(values.pop(name))[order]
    unit_sum_SPE, count_SP, histogram_LB = sums
    return Captured(
        together,
        [samples[i] for i in order],
        mean_cosine(torch.from_numpy(unit_sum_SPE), torch.from_numpy(count_SP)).numpy(),
        histogram_LB,
        list(heads),
        sorted(non_finite, key=lambda entry: entry.sample),
    )
