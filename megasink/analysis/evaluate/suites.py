"""The papers' benchmark suites, as lists of lm-evaluation-harness's tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Part:
    """One task of a suite.

    Attributes:
        task: name of a task, group or tag of lm-eval.
        shots: examples before each question; None for the task's own number.
        metric: the paper's, or lm-eval's main one if the paper does not say.
        benchmark: the paper's name, if several tasks are one benchmark of an average.
    """

    task: str
    shots: int | None
    metric: str
    benchmark: str = ""


@dataclass(frozen=True)
class Suite:
    """One row of the papers.

    Attributes:
        name: readable name; the row is another one.
        row: row of docs/papers.md.
        notes: open points of the paper, and gaps of lm-eval.
        metadata: values that lm-eval passes to the tasks' own code.
        data: data sets of the Hub that the tasks' own code reads, after minutes.
        averaged: benchmarks in the paper's average, which is a plain mean; 0 if it prints none.
    """

    name: str
    row: str
    parts: tuple[Part, ...]
    notes: str
    metadata: dict[str, Any] = field(default_factory=dict)
    averaged: int = 0
    data: tuple[str, ...] = ()


def _parts(*entries: tuple[str, str], shots: int | None = None) -> tuple[Part, ...]:
    return tuple(Part(task, shots, metric) for task, metric in entries)


_SILENT = "shots and normalization not given: lm-eval's own"
_ARC = (("arc_easy", "acc_norm"), ("arc_challenge", "acc_norm"))
# If the paper does not say which ARC: one benchmark, the mean of both.
_ONE_ARC = tuple(Part(task, None, metric, "ARC") for task, metric in _ARC)
_RULER_LENGTHS = [4096, 8192, 16384, 32768, 65536, 131072]

ALL = (
    Suite(
        "scratch-training",
        "P0.19",
        _parts(
            ("mmlu", "acc"),
            ("gsm8k", "exact_match,strict-match"),
            ("humaneval", "pass@1,create_test"),
            *_ARC,
            ("hellaswag", "acc_norm"),
            ("piqa", "acc_norm"),
            ("openbookqa", "acc_norm"),
            ("boolq", "acc"),
            ("winogrande", "acc"),
        ),
        f"{_SILENT}; the paper's average is the plain mean of the ten",
        averaged=10,
    ),
    Suite(
        "reasoning",
        "P0.24",
        (
            *_ONE_ARC,
            *_parts(
                ("leaderboard_musr", "acc_norm"),
                ("gsm8k", "exact_match,strict-match"),
                ("hendrycks_math500", "exact_match"),
                ("hendrycks_math", "exact_match"),
                ("processbench", "critique_f1"),
            ),
        ),
        f"{_SILENT}; which ARC is not given: the mean of both counts once; "
        "ProcessBench, which lm-eval lacks, is a task of megasink with its own wording",
        averaged=6,
    ),
    Suite(
        "long-context",
        "P0.25",
        _parts(
            ("longbench_hotpotqa", "score"),
            ("longbench_qasper", "score"),
            ("longbench_triviaqa", "score"),
            ("longbench_narrativeqa", "score"),
            ("longbench_2wikimqa", "score"),
            ("longbench_multifieldqa_en", "score"),
        ),
        "English MultiFieldQA is assumed; needs pip install 'megasink[eval-long]'",
        averaged=6,
    ),
    Suite(
        "value-drain",
        "P0.29",
        (
            *_ONE_ARC,
            *_parts(
                ("hellaswag", "acc_norm"),
                ("mmlu", "acc"),
                ("gsm8k", "exact_match,strict-match"),
                ("bbh", "exact_match,get-answer"),
                ("boolq", "acc"),
                ("toxigen", "acc"),
                ("truthfulqa_mc2", "acc"),
                ("humaneval", "pass@1,create_test"),
            ),
        ),
        f"{_SILENT}; which ARC is not given: the mean of both counts once in an average of nine; "
        "TQA taken as TruthfulQA",
        averaged=9,
    ),
    Suite(
        "few-shot",
        "P1.27",
        _parts(
            ("hellaswag", "acc_norm"),
            ("mmlu", "acc"),
            ("gsm8k", "exact_match,strict-match"),
            ("humaneval", "pass@1,create_test"),
            ("ceval-valid", "acc"),
            ("cmmlu", "acc"),
        ),
        "'few-shot' without a number: lm-eval's own, 0 for most; --num-fewshot sets it. "
        "Only C-Eval's validation split has public answers",
    ),
    Suite(
        "ruler-lengths",
        "P1.38",
        _parts(("ruler", "4096 to 131072")),
        "13 tasks, plain mean assumed; the metrics are lengths in tokens of the model's "
        "tokenizer. lm-eval's code downloads the texts: --allow-download; needs "
        "pip install 'megasink[eval-long]'",
        {"max_seq_lengths": _RULER_LENGTHS},
        data=("baber/paul_graham_essays",),
    ),
    Suite(
        "mmlu-intervention",
        "P3.14",
        _parts(("mmlu", "acc"), shots=5),
        "log-likelihood of the letters; the paper used lm-eval 0.4.5. --chat-template for "
        "-Instruct, -SFT and -DPO models",
    ),
    Suite(
        "piqa-winogrande",
        "P3.17",
        (Part("piqa", 0, "acc"), Part("winogrande", 5, "acc")),
        "as P3.14; acc or acc_norm of PIQA is not given",
    ),
)
SUITES = {key: suite for suite in ALL for key in (suite.name, suite.row)}
"""By readable name, and by row."""


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
