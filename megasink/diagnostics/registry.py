"""The registry of metrics: what a metric is, what it may ask for, and where its value goes.

A metric is a pure function whose parameters name the statistics that it needs, so that adding one
takes one function in one file of this folder: the capture computes what some metric asks for and
nothing else, and tables, files and figures list what is registered.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

ATTENTION: dict[str, str] = {
    "query_HTD": "queries as attention sees them: after rotary embeddings and query norms",
    "key_GTD": "keys as attention sees them, per key/value group",
    "value_GTD": "values, per key/value group",
    "out_HTD": "A V of each head, before an explicit gate and the output projection",
    "gated_out_HTD": "what enters the output projection: out_HTD where no gate is",
    "output_weight_HDE": "the output projection, by query head",
    "explicit_gate_HTX": "scores of an explicit gate after its activation; X is 1 or D",
    "gate_HT": "G: 1 - weight of the first token, or of the sink where one is; the explicit gate",
    "first_weight_HT": "A_i0, the weight of the first token",
    "slot_weight_HT": "the weight of the sink or bias; 0 where there is none",
    "entropy_HT": "nats; the sink, where there is one, is one more outcome",
    "square_HT": "sum over keys of A_ij ** 2",
    "column_sum_HT": "for each key j the sum over the queries i >= j of A_ij",
}
"""Of one sequence in one attention layer; padding is cut off before anything is computed.

Where the weights are no softmax, those of the statistics are the proxies of P2.37.
"""

STATE = {"state_TE": "x_0 the embedding, x_(l + 1/2) after attention, x_(l + 1) block l's output"}
"""Of one sequence in one state of the residual stream."""

BRANCHES = {
    "attention_branch_TE": "what attention returns, before any norm of it",
    "mlp_branch_TE": "what the MLP returns, before any norm of it",
}
"""Of one sequence in one block."""

STATISTICS: dict[str, str] = {**ATTENTION, **STATE, **BRANCHES}
"""The statistics that a metric may take, by parameter name; those of one table, or one branch.

Shapes: H query heads, G key/value groups, T tokens of the sequence, D head dim, E hidden size.
Floating point, at least float32.
"""

_TOGETHER = (set(ATTENTION), set(STATE), *({name} for name in BRANCHES))

AXES: dict[str, str] = {
    "head": "[H] per layer and sample",
    "head column": "[H, T] per layer and sample, by key position; the first few are kept",
    "layer": "a scalar per layer and sample",
    "layer position": "[T] per layer and sample, by token position; averaged over samples",
    "state": "a scalar per state of the residual stream and sample",
    "state position": "[T] per state and sample, by token position; averaged over samples",
}
"""The shapes that a metric may return."""


@dataclass(frozen=True)
class Metric:
    """One registered metric.

    Attributes:
        name: under which results, tables and figures show it.
        paper: rows that define it, such as "P3.1".
        unit: of the value; "1" for a pure number.
        axis: one of `AXES`.
        compute: the function; takes the statistics of `needs` by name.
        needs: names out of `STATISTICS`.
        summary: one line: the definition.
    """

    name: str
    paper: str
    unit: str
    axis: str
    compute: Callable[..., torch.Tensor]
    needs: tuple[str, ...]
    summary: str


_REGISTRY: dict[str, Metric] = {}


def metric(
    name: str, *, paper: str, unit: str, axis: str
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register the decorated function; the first line of its docstring is the summary.

    Raises:
        ValueError: a name that is taken, an unknown axis, or a parameter that is no statistic.
    """

    def register(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        needs = tuple(inspect.signature(function).parameters)
        unknown = [need for need in needs if need not in STATISTICS]
        if unknown:
            raise ValueError(
                f"metric {name!r} asks for {', '.join(unknown)}: the statistics are "
                f"{', '.join(STATISTICS)}"
            )
        if not any(set(needs) <= family for family in _TOGETHER):
            raise ValueError(f"metric {name!r} asks for {', '.join(needs)}: not known together")
        if axis not in AXES:
            raise ValueError(f"metric {name!r} has the axis {axis!r}: choose {', '.join(AXES)}")
        if name in _REGISTRY:
            raise ValueError(f"two metrics are called {name!r}")
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        _REGISTRY[name] = Metric(name, paper, unit, axis, function, needs, summary)
        return function

    return register


def metrics(names: Iterable[str] | None = None) -> dict[str, Metric]:
    """The registered metrics, or those of `names`, by name, in the order of files and lines.

    Raises:
        ValueError: a name that no metric has.
    """
    _discover()
    if names is None:
        # Not in that of imports, which depends on what else a process does.
        return dict(sorted(_REGISTRY.items(), key=lambda entry: _place(entry[1].compute)))
    names = list(names)
    unknown = [name for name in names if name not in _REGISTRY]
    if unknown:
        raise ValueError(f"no metric {', '.join(unknown)}: there are {', '.join(_REGISTRY)}")
    return {name: _REGISTRY[name] for name in names}


def _place(function: Callable[..., torch.Tensor]) -> tuple[str, int]:
    return function.__module__, inspect.unwrap(function).__code__.co_firstlineno


def _discover() -> None:
    """Import every file of this folder, so that its metrics register."""
    package = importlib.import_module("megasink.diagnostics")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"megasink.diagnostics.{module.name}")
