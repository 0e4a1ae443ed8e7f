"""Reduce sample values to the values of an analysis, as each metric's record defines.

Shapes: N samples; the rest as in `AXES`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from megasink.analysis.metrics.inputs import FACTS
from megasink.analysis.metrics.registry import OVER_SAMPLES, Metric, metrics, parameter_names


class AnalysisValues:
    """Computes every metric whose inputs were measured; the others are left out.

    Attributes:
        by_sample: metric -> [N, ...], for metrics of statistics and derived metrics by sample.
        overall: metric -> value of the analysis; metrics without any number are left out.
    """

    def __init__(self, values: Mapping[str, Tensor], facts: Mapping[str, Any]):
        self.by_sample = dict(values)
        self.overall: dict[str, Tensor] = {}
        self._known: dict[str, Any] = {n: fact for n, fact in facts.items() if n in FACTS}
        registered = metrics()
        for name in values:
            self._aggregate(registered[name])
        waiting = [entry for entry in registered.values() if entry.is_derived]
        while ready := [e for e in waiting if set(e.needs) <= self._known.keys()]:
            for entry in ready:
                self._derive(entry)
            waiting = [entry for entry in waiting if entry not in ready]

    def _derive(self, entry: Metric) -> None:
        value = entry.compute(*(self._known[need] for need in entry.needs))
        if entry.over_samples:
            self.by_sample[entry.name] = value
            self._aggregate(entry)
        else:
            self._keep(entry, value)

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
