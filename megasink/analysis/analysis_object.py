"""The results of an analysis: each metric is an attribute that can draw itself."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megasink.analysis.metrics import Metric, metrics
from megasink.analysis.pages.drawing import Drawing
from megasink.analysis.result_schemas import Results
from megasink.errors import UnknownName, UserError, nearest, reason_of, unknown_name
from megasink.figures.style import rendered, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
INACTIVE_SHARE = "0.15"
"""Figures show the threshold at which this share of the heads is inactive."""


@dataclass(frozen=True)
class Plot:
    """A drawn figure, which a notebook shows.

    Attributes:
        figure: of matplotlib; change it as any other.
    """

    figure: "Figure"

    def save(self, path: str | Path) -> None:
        """Write a .png, .pdf or .svg file."""
        try:
            with styled():
                self.figure.savefig(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be written: {reason_of(error)}") from error

    def _repr_png_(self) -> bytes:
        with styled():
            return rendered(self.figure, "png")


@dataclass(frozen=True)
class MetricValues:
    """A metric of a model.

    Attributes:
        metric: its definition, unit, axis and source.
        values: float64 along its axis, such as [layers, heads]; NaN where there is none. The mean
            over samples, or what the definition says.
        number: a single summary number, or a name for a category; None if there is none.
    """

    metric: Metric
    values: Floats
    number: float | str | None
    _analysis: "Analysis"

    def __array__(self, *args: Any, **options: Any) -> Any:
        return np.array(self.values, *args, **options)

    def __str__(self) -> str:
        unit = "" if self.metric.unit == "1" else f" ({self.metric.unit})"
        return f"{self.metric.title}{unit}: {self.metric.text(self.number) or '-'}"

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.values.shape)) or "one number"
        return f"<{self}; {self.metric.name}, {shape}>"

    def plot(self) -> Plot:
        """Draw the figure of the report that shows this metric: a curve, or a heatmap of heads."""
        known = {drawing.name for drawing in self._analysis.drawings()}
        for name in (self.metric.name, self.metric.figure):
            if self.metric.shown & {"curve", "heatmap"} and name in known:
                plot = self._analysis.plot(name)
                if plot is not None:
                    return plot
        raise UserError(f"no figure shows {self.metric.name}: use its values")


@dataclass(repr=False)
class Analysis:
    """All results of an analysis: `analysis.sink_rate`, `analysis.importance`, ...

    Every registered metric that the model has is an attribute (`dir(analysis)` lists them), a
    `MetricValues`. docs/metrics.md defines them.

    Attributes:
        name: of the model.
        results: everything as in results.json: of all samples, and of each dataset.
        by_sample: metric -> [samples, layers, heads] of the samples that the overall results
            are of, for inactive-head scores and for metrics compared by distribution.
        maps: from `megasink.analysis.capture.attention_maps.geometry`; empty without `--maps`.
        points: geometry.npz, points of tokens by PCA and t-SNE; empty if absent.
        drawings: returns the figures that `plot` knows.
    """

    name: str
    results: Results
    by_sample: dict[str, Floats]
    maps: dict[str, NDArray[Any]] = field(default_factory=dict)
    points: dict[str, NDArray[Any]] = field(default_factory=dict)
    drawings: Callable[[], Sequence[Drawing]] = tuple

    def has(self, metric: str) -> bool:
        """Return whether the model has this metric; only gated models have gate metrics."""
        return metric in self.results.metrics

    def values(self, metric: str, dataset: str | None = None) -> Floats:
        """Return a metric along its axis, over all samples or one dataset; NaN where missing."""
        if dataset is not None and dataset not in self.results.datasets:
            raise UserError(unknown_name("dataset", dataset, self.results.datasets))
        of = self.results if dataset is None else self.results.datasets[dataset]
        if metric not in of.metrics:
            raise UserError(f"the analysis of {self.name} has no {metric}: analyze the model again")
        return array(of.metrics[metric].values)

    def __getattr__(self, name: str) -> MetricValues:
        # Called for a missing attribute; copies and pickles ask before there are any.
        if name.startswith("_") or "results" not in vars(self):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> MetricValues:
        """Return a metric by name, such as "sink_rate_0.2", which cannot be an attribute."""
        if name not in self.results.metrics or name not in metrics():
            near = nearest(name, list(self))
            hint = f": did you mean {near}?" if near else "; list(analysis) lists all"
            raise UnknownName(f"{self.name} has no metric {name!r}{hint}")
        result = self.results.metrics[name]
        return MetricValues(metrics()[name], self.values(name), result.number, self)

    def __iter__(self) -> Iterator[str]:
        """Yield the name of every metric."""
        return (name for name in self.results.metrics if name in metrics())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self if name.isidentifier())]

    @property
    def summary(self) -> dict[str, float | str | None]:
        """The numbers of the report's summary: metric -> number."""
        return {name: self[name].number for name in self if metrics()[name].is_summarized}

    @property
    def figures(self) -> list[str]:
        """Names of the figures that `plot` can draw of this analysis."""
        return [drawing.name for drawing in self.drawings() if self.plot(drawing.name) is not None]

    def plot(self, figure: str) -> Plot | None:
        """Draw a figure of the report's folder by name; None if this model lacks the numbers."""
        known = {drawing.name: drawing for drawing in self.drawings()}
        if figure not in known:
            raise UserError(unknown_name("the figure", figure, list(known)))
        drawing = known[figure]
        with styled():
            drawn = drawing.draw(self if drawing.by_model else [self])
        return None if drawn is None else Plot(drawn)

    def __repr__(self) -> str:
        of = self.results
        return f"<Analysis of {self.name}: {of.samples} samples, {len(self)} metrics>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(entry.title)}</td><td>{html.escape(entry.unit)}</td>"
            f"<td>{html.escape(entry.text(number))}</td><td><code>{html.escape(name)}</code></td>"
            "</tr>"
            for name, number in self.summary.items()
            for entry in [metrics()[name]]
        )
        return f"<b>{html.escape(repr(self)[1:-1])}</b><table>{rows}</table>"


def array(nested: Any) -> Floats:
    """Convert nested lists of results.json to an array, null to NaN."""
    return np.asarray(nested, dtype=np.float64)
