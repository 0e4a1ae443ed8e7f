"""Dataclasses of results.json, sweep.json and ablation.json, explained in the documentation.

Values by layer, head and so on are nested lists, with null for missing entries.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megasink.analysis.metrics.registry import metrics_shown

FORMAT = 3
"""Incremented when an entry of results.json moves or changes its meaning."""


@dataclass
class MetricResult:
    """One metric: its values along its axis, and its summary number (a name for a category)."""

    values: Any
    number: float | str | None


@dataclass(kw_only=True)
class SampleResults:
    """Results over some samples."""

    samples: int
    tokens: int  # total number of tokens
    # Registered metric -> its result; metrics without any number are absent.
    metrics: dict[str, MetricResult]
    sink_positions: dict[str, float]  # token -> share of the heads that have a sink on it (P3.31)
    # Metric of the page's first sentence -> standard deviation of its number over samples; empty
    # for one sample.
    spread: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class DatasetResults(SampleResults):
    """Results of one dataset."""

    # Inactive-head score -> its 101 percentiles (P3.23).
    score_quantiles: dict[str, list[float | None]]
    repeat_rate: dict[str, float]  # n -> share of n-grams whose tokens are equal (P4.14)


@dataclass
class Agreement:
    """Agreement between scores on which heads are inactive: [score][score] (P3.18, P3.19)."""

    scores: list[str]
    iou: list[list[float | None]]
    precision: list[list[float | None]]


@dataclass
class InactiveHeads:
    """Inactive heads by score."""

    thresholds: dict[str, dict[str, float]]  # score -> share of heads -> threshold (P3.11)
    # Score -> share of each layer's heads if 15 % of all are inactive (P3.20).
    share_by_layer: dict[str, list[float | None]]
    quantiles: dict[str, list[float | None]]  # score -> its 101 percentiles
    agreement: Agreement


@dataclass(frozen=True)
class NonFinite:
    """A sample with non-finite values, which is left out of all averages."""

    sample: int  # index of the sample
    source: str  # where it came from
    layers: list[int]  # the affected layers
    heads: list[int]  # those of the first one


@dataclass(kw_only=True)
class ModelFacts:
    """The model, and its amount of training if known."""

    name: str = ""
    kind: str = ""
    attention: str = ""
    dtype: str = ""
    parameters: int | None = None
    step: int | None = None
    trained_tokens: int | None = None
    layers: int
    heads: list[int]


@dataclass(kw_only=True)
class RunFacts:
    """Command-line options and inputs of an analysis."""

    data: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    bos: str | None = None
    seq_length: int | None = None
    max_samples: int | None = None
    # Lowest and highest length at which sequences were cut at random.
    random_lengths: list[int] | None = None
    # Positions of every sequence whose tokens were replaced, from 0, not counting a sink token
    # (P2.15, P2.16).
    replaced_positions: list[int] | None = None
    replaced_with: str | None = None  # "random", or the id of a token
    seed: int
    device: str | None = None
    # Hash of everything that changes a result; only for `megasink analyze`.
    identity: str | None = None
    # Hash of the model's weights, so that thresholds are not used for another model; only for
    # `megasink analyze`.
    weights: str | None = None
    data_sha256: str  # of the token ids of all samples in order


@dataclass(kw_only=True)
class Results(SampleResults):
    """Contents of results.json; overall results are of texts, or else of made-up tokens."""

    format: int  # `FORMAT`
    # megasink, torch, python: versions.
    megasink: str
    torch: str
    python: str
    model: ModelFacts
    run: RunFacts
    non_finite: list[NonFinite]
    # Dataset -> its results; made-up tokens are "random" and "repeated".
    datasets: dict[str, DatasetResults]
    inactive_heads: InactiveHeads
    geometry: dict[str, Any]  # facts about the points of geometry.npz
    # average_perplexity, perplexity_of_average_nats: over texts, each counted once (P1.26).
    average_perplexity: float | None = None
    perplexity_of_average_nats: float | None = None
    # Counts of explicit gate scores by layer, in 100 bins over [0, 1] (P1.29).
    gate_histogram: list[list[int]] | None = None


@dataclass(kw_only=True)
class SweepRow:
    """One setting of a sweep."""

    length: int  # text tokens
    bos: str  # "add" or "none"
    copies: int  # copies of BOS or, without BOS, of the first token of the text
    samples: int  # number of samples in the averages
    tokens: int  # sequence tokens, including BOS and copies before the text
    non_finite: list[str]  # sources of the samples left out of them
    metrics: dict[str, MetricResult]  # as in `SampleResults`, for metrics that are shown somewhere
    # Score -> share of inactive heads; also by [layer] and by [layer][head].
    inactive: dict[str, float]
    inactive_by_layer: dict[str, list[float | None]]
    inactive_by_head: dict[str, list[list[float | None]]]


@dataclass(kw_only=True)
class SweepResults:
    """Contents of sweep.json."""

    format: int
    megasink: str
    model: ModelFacts
    data: list[str]
    max_samples: int | None  # per input
    data_sha256: str  # hash of the texts' token ids
    # replaced_positions, replaced_with: as in `RunFacts`.
    replaced_positions: list[int] | None = None
    replaced_with: str | None = None
    set_by: str
    # Score -> threshold of inactive heads in every row; set by the row `set_by`.
    thresholds: dict[str, float]
    rows: list[SweepRow]


def number_of(of: "SampleResults | SweepRow", metric: str) -> Any:
    """Return the number of a metric; None if there is none."""
    return of.metrics[metric].number if metric in of.metrics else None


def scalars_of(of: SampleResults) -> dict[str, float | str | None]:
    """Return the number of each registered scalar metric; None if there is none."""
    return {name: number_of(of, name) for name in metrics_shown("scalar")}


ABLATION_FORMAT = 2
"""Incremented when an entry of ablation.json moves or changes its meaning."""

UNCHANGED, RANDOM = "unchanged", "random"
"""Rows of the model without interventions, and of the random baseline (P3.9)."""

ALL = "all texts"
"""Name of all texts together, where there are several datasets."""


@dataclass(kw_only=True)
class AblationValue:
    """The result of one point on a dataset, on all texts, or in a task."""

    value: float | None  # nats per token, or the task's metric in percent; null if infinite or NaN
    change: float | None  # the value minus that of the unchanged model
    # Of `change`, by the differences of the same texts or questions. Null for a single one, and for
    # a task whose metric is not the mean of its questions', such as that of a group of tasks.
    standard_error: float | None
    # Null for tasks, and for tokenizers whose tokens do not map to bytes.
    bits_per_byte: float | None
    samples: int  # number of texts or questions


@dataclass(kw_only=True)
class AblationPoint:
    """One setting of the model."""

    row: str  # a score, "random", "unchanged", or the option that gave the heads
    label: str  # unique name of the point, also in points.npz
    # Percentage of heads that the thresholds are set for; null if there are none.
    asked: float | None
    seed: int | None  # of the random baseline
    interventions: list[dict[str, Any]]  # what was changed, as in a file of interventions
    # Percentage of the model's heads that were zeroed: the mean over samples of the mean over
    # layers (P3.13); null if the intervention does not count them.
    zeroed: float | None
    values: dict[str, AblationValue]  # dataset or task -> what was measured
    key: str  # name of its file in the folder points

    def number(self, on: str, what: str = "value") -> float:
        """Return a number of a dataset or task; NaN if there is none."""
        number: float | None = getattr(self.values[on], what)
        return math.nan if number is None else number


Line = dict[float, list[AblationPoint]]
"""The points of one score by requested percentage, with one point for each seed."""


def mean_line(line: Line, on: str) -> tuple[list[float], list[float]]:
    """Return the percentages of heads zeroed and the values, each the mean over seeds."""
    x = [float(np.mean([point.zeroed or 0.0 for point in points])) for points in line.values()]
    return x, [float(np.mean([p.number(on) for p in points])) for points in line.values()]


@dataclass(kw_only=True)
class AblationCurve:
    """The curve of one score on one dataset or task."""

    score: str  # the score, or "random": then of the mean over seeds
    on: str  # the dataset or task
    auc: float | None  # area under the curve over its span (P3.16); null if it is infinite
    rank: int  # of the AUC among the scores, 1 the best
    removable: float  # percentage of heads that can be zeroed, by the published rule (P3.15)
    # Whether no point fell below the level: then at least `measured_to` percent can be zeroed,
    # although the published rule says 0.
    never_left: bool
    measured_to: float  # the largest percentage of heads zeroed
    auc_by_seed: dict[str, float | None]  # of the random baseline
    # The AUC minus that of the random baseline, and `over_random_interval` the half-width of its 95
    # % interval over texts or questions, each paired with itself, all scores together; null for the
    # baseline, a single text, and a task without differences.
    over_random: float | None = None
    over_random_interval: float | None = None


@dataclass(kw_only=True)
class AblationResults:
    """Contents of ablation.json."""

    format: int  # `ABLATION_FORMAT`
    # megasink, torch: versions.
    megasink: str
    torch: str
    model: ModelFacts
    data: list[str]  # the texts
    data_sha256: str | None
    tasks: dict[str, str]  # of lm-eval, with their versions
    samples: int | None
    quantity: str  # what `AblationValue.value` is
    higher_is_better: bool  # false for a loss
    # How much worse still counts as kept (P3.15): points of a percentage, or a share of the
    # unchanged model's loss.
    tolerance: float
    calibration: str | None  # the analysis or texts that set the thresholds
    thresholds: dict[str, dict[str, float]]  # score -> percentage asked for -> threshold (P3.11)
    points: list[AblationPoint]
    curves: list[AblationCurve]

    def of(self, row: str) -> list[AblationPoint]:
        """Return the points of a row, in the order in which they were measured."""
        return [point for point in self.points if point.row == row]

    @property
    def unchanged(self) -> AblationPoint:
        """The model without interventions."""
        return self.of(UNCHANGED)[0]

    @property
    def scores(self) -> list[str]:
        """The scores with a curve, the random baseline first."""
        return list(dict.fromkeys(curve.score for curve in self.curves))

    def line(self, score: str) -> Line:
        """Return the points of a score, with the unchanged model at 0 %, for comparable areas."""
        line: Line = {}
        for point in self.of(score):
            if point.asked is not None:
                line.setdefault(point.asked, []).append(point)
        line.setdefault(0.0, [self.unchanged])
        return dict(sorted(line.items()))
