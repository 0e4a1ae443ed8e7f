"""The papers' benchmark suites, as lists of lm-evaluation-harness's tasks; see suites.toml."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Part:
    """One task of a suite."""

    task: str  # name of a task, group or tag of lm-eval
    metric: str  # the paper's, or lm-eval's main one if the paper does not say
    shots: int | None = None  # examples before each question; None for the task's own number
    benchmark: str = ""  # the paper's name, if several tasks are one benchmark of an average


@dataclass(frozen=True)
class Suite:
    """One row of the papers."""

    name: str  # readable name; the row is another one
    row: str  # of docs/papers.md
    parts: tuple[Part, ...]
    notes: str  # open points of the paper, and gaps of lm-eval
    metadata: dict[str, Any] = field(default_factory=dict)  # for the tasks' own code
    # Benchmarks in the paper's average, which is a plain mean; 0 if it prints none.
    averaged: int = 0
    data: tuple[str, ...] = ()  # data sets of the Hub that the tasks' own code reads, after minutes


def _suite(name: str, parts: list[Any], data: Sequence[str] = (), **about: Any) -> Suite:
    made = (Part(task, metric, **dict(*options)) for task, metric, *options in parts)
    return Suite(name, parts=tuple(made), data=tuple(data), **about)


_FILE = Path(__file__).with_suffix(".toml")
ALL = tuple(
    _suite(name, **about)
    for name, about in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
)
SUITES = {key: suite for suite in ALL for key in (suite.name, suite.row)}
"""Suites, by readable name and by paper row."""


@dataclass(frozen=True)
class TaskRequest:
    """A task to load, alone or as part of a suite."""

    task: str
    shots: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] = ()


def expanded(names: Sequence[str]) -> list[TaskRequest]:
    """Return the tasks behind names, each once, with the shots of the suites among them."""
    entries: dict[str, TaskRequest] = {}
    for name in names:
        suite = SUITES.get(name)
        if suite is None:
            entries.setdefault(name, TaskRequest(name))
            continue
        for part in suite.parts:
            request = TaskRequest(part.task, part.shots, suite.metadata, suite.data)
            entries.setdefault(part.task, request)
    return list(entries.values())


@dataclass(frozen=True)
class Average:
    """The average of a suite, as its paper forms it."""

    value: float  # plain mean over `benchmarks`; of each the mean over its tasks
    benchmarks: dict[str, float]  # name -> value
    paper: int  # number of benchmarks in the paper's average


def averages(names: Sequence[str], scores: Mapping[tuple[str, str], float]) -> dict[str, Average]:
    """Return averages by row, of the named suites whose paper prints one and that are complete."""
    by_row = {}
    for suite in {SUITES[name].row: SUITES[name] for name in names if name in SUITES}.values():
        parts = [(part.benchmark or part.task, (part.task, part.metric)) for part in suite.parts]
        if not suite.averaged or any(key not in scores for _, key in parts):
            continue
        by_benchmark: dict[str, list[float]] = {}
        for benchmark, key in parts:
            by_benchmark.setdefault(benchmark, []).append(scores[key])
        means = {name: fmean(values) for name, values in by_benchmark.items()}
        by_row[suite.row] = Average(fmean(means.values()), means, suite.averaged)
    return by_row
