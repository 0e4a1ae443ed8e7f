"""Dataclasses of results.json; docs/metrics.md explains them.

Values by layer, head and so on are nested lists, with null for missing entries.
"""

from dataclasses import dataclass, field
from typing import Any

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
    """Contents of results.json.

    Overall results are of texts; of made-up tokens only without texts.
    """

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


def scalars_of(of: SampleResults) -> dict[str, float | str | None]:
    """Return the number of each registered scalar metric; None if there is none."""
    nothing = MetricResult(None, None)
    return {name: of.metrics.get(name, nothing).number for name in metrics_shown("scalar")}
