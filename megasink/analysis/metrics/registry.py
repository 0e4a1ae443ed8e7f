"""The registry of metrics: one record per metric, with its definition, function and outputs.

A metric is a pure function. Its parameter names declare its inputs:

- *statistics* of one sequence, captured by a probe: the metric is computed for every sample;
- other *metrics*, by name and shape: `importance_LH` is the importance of the whole analysis,
  `importance_NLH` that of every sample (N samples). Such a metric is derived;
- *facts* of the samples, such as `tokens_N`, for a derived metric.

The capture computes only the statistics that some metric requests, and all results list every
registered metric. Any module may register one: `from megasink.analysis.metrics import metric`.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megasink.attention.constants import BACKWARD_SCORES, SCORES

if TYPE_CHECKING:  # code for flags and curves also reads the records, without torch
    from torch import Tensor

ATTENTION: dict[str, str] = {
    "query_HTD": "queries as attention sees them: after rotary embeddings and query norms",
    "key_GTD": "keys as attention sees them, per key/value group",
    "value_GTD": "values, per key/value group",
    "out_HTD": "weighted sum of values of a head, before explicit gate and output projection",
    "gated_out_HTD": "input of the output projection: out_HTD without a gate",
    "output_weight_HDE": "the output projection, by query head",
    "explicit_gate_HTX": "scores of an explicit gate after its activation; X is 1 or D",
    "gate_HT": "G: the explicit gate, else 1 - weight of the sink, else 1 - first_weight_HT",
    "first_weight_HT": "A_i0, the weight of the first token",
    "slot_weight_HT": "weight of the sink or bias; 0 if there is none",
    "entropy_HT": "in nats, with a sink as one more outcome",
    "square_HT": "sum over keys of A_ij ** 2",
    "column_sum_HT": "for each key j, the sum of A_ij over the queries i >= j",
}
"""Statistics of one sequence in one attention layer, after padding is removed.

For non-softmax weights, the weight statistics are the proxies of P2.37.
"""

STATE = {"state_TE": "x_0 the embedding, x_(l + 1/2) after attention, x_(l + 1) block l's output"}
"""Statistics of one sequence in one state of the residual stream."""

BRANCHES = {
    "attention_branch_TE": "output of attention, before any norm on it",
    "mlp_branch_TE": "output of the MLP, before any norm on it",
}
"""Statistics of one sequence in one block."""

GRADIENT = {
    "mask_gradient_H": "derivative of the sequence's mean loss (nats) with respect to a factor on "
    "each head's output, at factor 1; needs a backward pass"
}
"""Statistics of one sequence in one attention layer, measured only with `--metrics`."""

STATISTICS: dict[str, str] = {**ATTENTION, **STATE, **BRANCHES, **GRADIENT}
"""Statistics that a metric may use, by parameter name. A metric uses one set of `TOGETHER`.

Shapes: H query heads, G key/value groups, T tokens of the sequence, D head dim, E hidden size.
Floating point, at least float32.
"""

TOGETHER = (set(ATTENTION), set(STATE), *({name} for name in (*BRANCHES, *GRADIENT)))
"""Sets of statistics that one metric may use together."""

FACTS: dict[str, str] = {
    "tokens_N": "number of tokens of each sample",
    "nats_N": "summed loss of each sample's targets",
    "targets_N": "number of predicted tokens of each sample",
    "bytes_N": "bytes of text that the targets encode; unknown for tokenizers without text",
    "nats_of_bytes_N": "summed loss of the targets that encode bytes of the text",
    "cosine_SP": "mean cosine between the states of different samples (P4.5)",
    "seed": "seed of the analysis, an int",
}
"""Facts that a derived metric may use. A metric is left out if a fact that it uses is unknown."""

AXES: dict[str, tuple[str, str]] = {
    "head": ("LH", "by layer and head"),
    "head column": ("LHK", "by layer, head and key position; the first few are kept"),
    "layer": ("L", "by layer"),
    "layer position": ("LP", "by layer and token position"),
    "state": ("S", "by state of the residual stream"),
    "state position": ("SP", "by state and token position"),
    "key": ("K", "by key position, over all heads; derived metrics only"),
    "model": ("", "one number; derived metrics only"),
}
"""Axis -> (shape of an analysis value, description).

A metric computed from statistics returns the values of one layer or state: [H], [H, T], a scalar
or [T].
"""

_DERIVED_ONLY = ("key", "model")


OVER_SAMPLES: dict[str, "Callable[[Tensor, Tensor], Tensor]"] = {
    "mean": lambda values, tokens_N: values.nanmean(0),
    "mean over tokens": lambda values, tokens_N: (
        (tokens_N.to(values.dtype) / tokens_N.sum())[None] @ values.flatten(1)
    ).reshape(values.shape[1:]),
    "min": lambda values, tokens_N: values.amin(0),
    "max": lambda values, tokens_N: values.amax(0),
    "median": lambda values, tokens_N: values.nanmedian(0).values,
}
"""Reduction of sample values, [N, ...], to the value of the analysis."""

SCALARS: dict[str, "Callable[[Tensor], Tensor]"] = {
    "mean": lambda values: values.nanmean(),
    "first": lambda values: values.flatten()[0],
    "mean over block outputs": lambda values: values[2::2].nanmean(),
    "max over block outputs": lambda values: values[2::2].nan_to_num(nan=-math.inf).amax(),
}
"""Reduction of the value of an analysis to one number, for places that show only one."""

SHOWN: dict[str, str] = {
    "table": "a column in the CSV table of its axis; for the axis model, a number in datasets.csv",
    "curve": "a line in a figure, one for each model",
    "heatmap": "a [layer, head] picture of each model",
    "scalar": "its number by dataset, by checkpoint (trace), in training (TensorBoard, W&B), and "
    "for several models side by side",
    "wasserstein": "distance between the sample values of each pair of models (P3.21)",
    "rank": "rank correlation and shared top five of the heads of each pair of models (P3.30)",
}
"""Where a metric may appear. results.json has every metric, and samples.npz its sample values."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One registered metric."""

    name: str  # identifier in files
    definition: str  # one line
    unit: str  # of the value; "1" for a pure number, "share" for one in [0, 1]
    axis: str  # one of `AXES`
    source: str  # paper rows that define it, such as "P3.1", or its origin in words
    compute: "Callable[..., Tensor]"
    needs: tuple[str, ...]  # inputs of its parameters, in order
    over_samples: str | None  # one of `OVER_SAMPLES`; None for a metric of the whole analysis
    shown: frozenset[str]  # subset of `SHOWN`
    scalar: str  # one of `SCALARS`
    title: str  # name on the page and in figures
    figure: str = "metrics"  # with its curve, see `analysis/pages/metric_figures.py`
    number: str = "{:.3f}"  # format of its number
    levels: tuple[str, ...] = ()  # names of the values 0, 1, ... of a categorical metric
    # The key whose weight it counts; the page also prints what a head that attends evenly gives it.
    key: int | None = None
    # "above" or "below", for a score whose threshold marks inactive heads (P3.11).
    inactive: str | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)  # of its values, and so of thresholds

    @property
    def is_derived(self) -> bool:
        """Whether it is computed from other metrics, not from statistics."""
        return not set(self.needs) <= STATISTICS.keys()

    @property
    def takes_backward(self) -> bool:
        """Whether it takes a backward pass, and is measured only on request."""
        return not GRADIENT.keys().isdisjoint(self.needs)

    @property
    def is_summarized(self) -> bool:
        """Whether the tables of models and datasets show its number."""
        return "scalar" in self.shown or ("table" in self.shown and self.axis in _DERIVED_ONLY)

    def number_of(self, value: "Tensor") -> float | str | None:
        """Return its number: a name for a category, None if there is none."""
        number = float(SCALARS[self.scalar](value))
        if not math.isfinite(number):
            return None
        return self.levels[int(number)] if self.levels else number

    def text(self, number: float | str | None) -> str:
        """Format its number for the page."""
        return self.number.format(number) if isinstance(number, float | int) else number or ""


_REGISTRY: dict[str, Metric] = {}


def metric(
    name: str,
    *,
    unit: str,
    axis: str,
    source: str,
    over_samples: str | None = None,
    shown: Iterable[str] = ("table",),
    scalar: str | None = None,
    title: str | None = None,
    needs: tuple[str, ...] | None = None,
    **options: Any,
) -> "Callable[[Callable[..., Tensor]], Callable[..., Tensor]]":
    """Register the decorated function; the first line of its docstring is the definition.

    See `Metric` for the arguments. `over_samples` is "mean" by default for metrics of statistics,
    `scalar` "first" by key position and else "mean", and `needs` the names of the parameters.

    Raises:
        ValueError: a duplicate name, no docstring, or an unknown value or metric.
    """

    def register(function: "Callable[..., Tensor]") -> "Callable[..., Tensor]":
        if not function.__module__.startswith("megasink.analysis.metrics."):
            _discover()
        given = tuple(inspect.signature(function).parameters) if needs is None else needs
        of_statistics = set(given) <= STATISTICS.keys()
        entry = Metric(
            name=name,
            definition=(inspect.getdoc(function) or "").partition("\n")[0],
            unit=unit,
            axis=axis,
            source=source,
            compute=function,
            needs=given,
            over_samples=over_samples or ("mean" if of_statistics else None),
            shown=frozenset(shown),
            scalar=scalar or ("first" if axis == "key" else "mean"),
            title=title or name.replace("_", " "),
            **options,
        )
        if problems := list(_problems(entry)):
            raise ValueError(f"metric {name!r} " + "; ".join(problems))
        _REGISTRY[name] = entry
        return function

    return register


def _problems(entry: Metric) -> Iterable[str]:
    if entry.name in _REGISTRY:
        yield f"is registered twice, first in {_REGISTRY[entry.name].compute.__module__}"
    if not entry.definition:
        yield "has no docstring: its first line must be the definition"
    if not entry.source:
        yield "has no source: give a row of a paper such as P3.1, or a description"
    for what, value, known in (
        ("axis", entry.axis, AXES),
        ("over_samples", entry.over_samples, (None, *OVER_SAMPLES)),
        ("scalar", entry.scalar, SCALARS),
        ("inactive", entry.inactive, (None, "above", "below")),
        *(("shown", where, SHOWN) for where in sorted(entry.shown)),
    ):
        if value not in known:
            yield f"has {what} {value!r}: choose {', '.join(map(str, known))}"
    for where in sorted(entry.shown & {"heatmap", "rank", "wasserstein"}):
        if entry.axis != "head":
            yield f"has shown={where}, which needs axis 'head'"
    if "curve" in entry.shown and entry.axis == "model":
        yield "has shown=curve, but is a single number"
    if "wasserstein" in entry.shown and entry.is_derived and not entry.over_samples:
        yield "has shown=wasserstein, but no values by sample: set over_samples"
    if not entry.is_derived:
        if not any(set(entry.needs) <= family for family in TOGETHER):
            yield f"needs {', '.join(entry.needs)}, which are not available together"
        if entry.axis in _DERIVED_ONLY:
            yield f"has axis {entry.axis!r}, which only derived metrics can have"
        return
    for need in entry.needs:
        if need in FACTS:
            continue
        base, _, shape = need.rpartition("_")
        made = _REGISTRY.get(base if shape.isupper() else need)
        if made is None:
            yield (
                f"needs {need}, which is neither a statistic ({', '.join(STATISTICS)}), nor a "
                f"fact ({', '.join(FACTS)}), nor a metric registered so far"
            )
        elif need not in (names := parameter_names(made)):
            yield f"needs {need}: write {' or '.join(names)}"


def parameter_names(entry: Metric) -> list[str]:
    """Return the parameter names for a metric's analysis value and its sample values."""
    letters = AXES[entry.axis][0]
    names = [f"{entry.name}_{letters}" if letters else entry.name]
    return names + ([f"{entry.name}_N{letters}"] if entry.over_samples else [])


def metrics(names: Iterable[str] | None = None) -> dict[str, Metric]:
    """Return the registered metrics, or those in `names`, by name, in file and line order."""
    _discover()
    if names is None:
        # Not in import order, which depends on the rest of the process.
        return dict(sorted(_REGISTRY.items(), key=lambda entry: _place(entry[1].compute)))
    names = list(names)
    unknown = [name for name in names if name not in _REGISTRY]
    if unknown:
        raise ValueError(f"unknown metric {', '.join(unknown)}: choose from {', '.join(_REGISTRY)}")
    return {name: _REGISTRY[name] for name in names}


def measured(names: Iterable[str] | None = None, also: Iterable[str] = ()) -> dict[str, Metric]:
    """Return metrics of statistics in `names`; None: those without a backward pass, and `also`."""
    asked = metrics(also)
    return {
        name: entry
        for name, entry in metrics(names).items()
        if not entry.is_derived and (names is not None or name in asked or not entry.takes_backward)
    }


def backward_names() -> list[str]:
    """Return the values of `--metrics`, plugins' included, without torch."""
    others = [n for n, entry in _REGISTRY.items() if entry.takes_backward]
    return list(dict.fromkeys((*BACKWARD_SCORES, *others)))


def score_names() -> list[str]:
    """Return the scores of inactive heads, plugins' included, without torch."""
    return [*SCORES, *(n for n, e in _REGISTRY.items() if e.inactive and n not in SCORES)]


def metrics_shown(where: str) -> dict[str, Metric]:
    """Return the metrics shown in one of the places of `SHOWN`."""
    return {name: entry for name, entry in metrics().items() if where in entry.shown}


def _place(function: "Callable[..., Tensor]") -> tuple[bool, str, int]:
    """Return the sort key of a metric; other packages come last."""
    module = function.__module__
    is_other = not module.startswith("megasink.analysis.metrics.")
    return is_other, module, inspect.unwrap(function).__code__.co_firstlineno


def _discover() -> None:
    """Import every module of this package, which registers its metrics."""
    package = importlib.import_module("megasink.analysis.metrics")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"megasink.analysis.metrics.{module.name}")
