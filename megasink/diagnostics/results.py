"""What results.json holds, as dataclasses; docs/instruments.md explains it.

Values by layer, head and so on are nested lists, null where something does not exist.
"""

from dataclasses import dataclass, field
from typing import Any

from megasink.diagnostics.registry import metrics_shown

FORMAT = 3
"""Raised when something in results.json changes its place or its meaning."""


@dataclass
class MetricResult:
    """One metric: its values along its axis, and its number (of a category the name)."""

    values: Any
    number: float | str | None


@dataclass(kw_only=True)
class SampleResults:
    """What was measured of some samples.

    Attributes:
        tokens: of all of them.
        metrics: registered metric -> its result; those without any number are absent.
        sink_positions: token -> share of the heads that have a sink on it (P3.31).
    """

    samples: int
    tokens: int
    metrics: dict[str, MetricResult]
    sink_positions: dict[str, float]


@dataclass(kw_only=True)
class DatasetResults(SampleResults):
    """The samples of one data set, by themselves.

    Attributes:
        score_quantiles: score of inactive heads -> its 101 percentiles (P3.23).
        repeat_rate: n -> share of n-grams whose tokens are equal (P4.14).
    """

    score_quantiles: dict[str, list[float | None]]
    repeat_rate: dict[str, float]


@dataclass
class Agreement:
    """How far scores call the same heads inactive: [score][score] (P3.18, P3.19)."""

    scores: list[str]
    iou: list[list[float | None]]
    precision: list[list[float | None]]


@dataclass
class InactiveHeads:
    """Inactive heads by score.

    Attributes:
        thresholds: score -> share of heads -> threshold (P3.11).
        share_by_layer: score -> share of each layer's heads, 15 % of all being inactive (P3.20).
        quantiles: score -> its 101 percentiles.
    """

    thresholds: dict[str, dict[str, float]]
    share_by_layer: dict[str, list[float | None]]
    quantiles: dict[str, list[float | None]]
    agreement: Agreement


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


@dataclass(kw_only=True)
class ModelFacts:
    """The model, and how far it was trained where that is known."""

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
    """Options of the command line, and what it was run on.

    Attributes:
        identity: hash of whatever changes a result; of `megasink analyze` alone.
        data_sha256: of the token ids of all samples in order.
    """

    data: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    bos: str | None = None
    seq_length: int | None = None
    max_samples: int | None = None
    seed: int
    device: str | None = None
    identity: str | None = None
    data_sha256: str


@dataclass(kw_only=True)
class Results(SampleResults):
    """The content of results.json.

    Attributes:
        format: `FORMAT`; megasink, torch, python: versions.
        datasets: data set -> its results.
        geometry: about the points of geometry.npz.
        average_perplexity, perplexity_of_average_nats: over the texts, each counted once (P1.26).
        gate_histogram: counts of explicit gate scores by layer, in 100 bins over [0, 1] (P1.29).
    """

    format: int
    megasink: str
    torch: str
    python: str
    model: ModelFacts
    run: RunFacts
    non_finite: list[NonFinite]
    datasets: dict[str, DatasetResults]
    inactive_heads: InactiveHeads
    geometry: dict[str, Any]
    average_perplexity: float | None = None
    perplexity_of_average_nats: float | None = None
    gate_histogram: list[list[int]] | None = None


@dataclass(kw_only=True)
class SweepRow:
    """One setting of a sweep.

    Attributes:
        length: tokens of the text; tokens: of the sequences, with BOS and copies before the text.
        bos: "add" or "none".
        copies: of BOS, or without BOS of the first token of the text.
        samples: in the averages.
        non_finite: sources of the samples that are in none.
        metrics: as in `SampleResults`, those that are shown somewhere.
        inactive: score -> share of inactive heads; also by [layer] and by [layer][head].
    """

    length: int
    bos: str
    copies: int
    samples: int
    tokens: int
    non_finite: list[str]
    metrics: dict[str, MetricResult]
    inactive: dict[str, float]
    inactive_by_layer: dict[str, list[float | None]]
    inactive_by_head: dict[str, list[list[float | None]]]


@dataclass(kw_only=True)
class SweepResults:
    """The content of sweep.json.

    Attributes:
        max_samples: of each input; data_sha256: of the texts' token ids.
        thresholds: score -> threshold of inactive heads in every row; set by the row `set_by`.
    """

    format: int
    megasink: str
    model: ModelFacts
    data: list[str]
    max_samples: int | None
    data_sha256: str
    set_by: str
    thresholds: dict[str, float]
    rows: list[SweepRow]


def scalars_of(of: SampleResults) -> dict[str, float | str | None]:
    """The number of each registered metric that is shown as a scalar; None where there is none."""
    nothing = MetricResult(None, None)
    return {name: of.metrics.get(name, nothing).number for name in metrics_shown("scalar")}
