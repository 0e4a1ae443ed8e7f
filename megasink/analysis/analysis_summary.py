"""Build results.json from the measurements and the registered metrics.

Shapes: N samples, L layers, H heads.
"""

import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import megasink
from megasink.analysis.capture.input_samples import MADE, Sample, repeat_rate
from megasink.analysis.capture.measurements import AnalysisValues, Floats, Measurements
from megasink.analysis.metrics import inactive_heads, metrics
from megasink.analysis.metrics.sinks import sink_positions
from megasink.analysis.result_schemas import (
    FORMAT,
    Agreement,
    DatasetResults,
    InactiveHeads,
    MetricResult,
    ModelFacts,
    Results,
    RunFacts,
)
from megasink.attention.constants import SHARES
from megasink.files.checked_fields import to_json

AGREEMENT_SHARE, LAYER_SHARE = 0.1, 0.15
NGRAMS = (2, 3, 4)


def summarize(
    measurements: Measurements,
    analysis: AnalysisValues,
    *,
    model: dict[str, Any],
    run: RunFacts,
    inputs: Sequence[Sample] = (),
    geometry: dict[str, Any] | None = None,
) -> Results:
    """Return the contents of results.json."""
    histogram = measurements.gate_histogram_LB
    about = [measurements.samples[i] for i in measurements.shown()]
    names = dict.fromkeys(sample.dataset for sample in measurements.samples)
    datasets = {name: _dataset(measurements, run.seed, name, inputs) for name in names}
    nats = [
        datasets[name].metrics["nats_per_token"].values
        for name in names
        if name not in MADE and "nats_per_token" in datasets[name].metrics
    ]
    return Results(
        format=FORMAT,
        megasink=megasink.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        model=ModelFacts(**model, layers=len(measurements.heads), heads=measurements.heads),
        run=run,
        samples=len(about),
        tokens=sum(sample.tokens for sample in about),
        non_finite=measurements.non_finite,
        **_of_samples(analysis),
        datasets=datasets,
        inactive_heads=_inactive_heads(scores_of(analysis)),
        geometry=to_json(geometry or {}),
        # Over the texts, each counted once (P1.26): both readings of the paper's average.
        average_perplexity=sum(map(math.exp, nats)) / len(nats) if nats else None,
        perplexity_of_average_nats=math.exp(sum(nats) / len(nats)) if nats else None,
        gate_histogram=histogram.tolist() if histogram.any() else None,
    )


def metric_results(analysis: AnalysisValues) -> dict[str, MetricResult]:
    """Return the registered metrics that have a value, in registry order."""
    return {
        name: MetricResult(to_json(analysis.overall[name]), entry.number_of(analysis.overall[name]))
        for name, entry in metrics().items()
        if name in analysis.overall
    }


def scores_of(analysis: AnalysisValues) -> dict[str, Floats]:
    """Return the scores of inactive heads, [N, L, H]."""
    names = (name for name, entry in metrics().items() if entry.inactive)
    return {n: analysis.by_sample[n].numpy() for n in names if n in analysis.by_sample}


def _dataset(
    measurements: Measurements, seed: int, name: str, inputs: Sequence[Sample]
) -> DatasetResults:
    analysis = measurements.analysis_values(seed, name)
    tokens = [sample.tokens for sample in measurements.samples if sample.dataset == name]
    documents = [sample.tokens for sample in inputs if sample.dataset == name]
    longest = max(map(len, documents), default=0)
    return DatasetResults(
        samples=len(tokens),
        tokens=sum(tokens),
        **_of_samples(analysis),
        score_quantiles={n: _percentiles(s) for n, s in scores_of(analysis).items()},
        repeat_rate={str(n): repeat_rate(documents, n) for n in NGRAMS if longest >= n},
    )


def _of_samples(analysis: AnalysisValues) -> dict[str, Any]:
    """Return the entries of `SampleResults` that are computed."""
    spreads = {name: analysis.spread(name) for name in ("sink_rate", "first_token_attention")}
    names, by_sample = ("sink_position", "sink_alpha"), analysis.by_sample
    places = [by_sample[name] for name in names if name in by_sample]
    return {
        "metrics": metric_results(analysis),
        "sink_positions": sink_positions(*places) if len(places) == 2 else {},
        "spread": {name: value for name, value in spreads.items() if value is not None},
    }


def _percentiles(values: Floats) -> list[float | None]:
    percentiles: list[float | None] = to_json(np.nanquantile(values, np.linspace(0, 1, 101)))
    return percentiles


def _inactive_heads(scores: dict[str, Floats]) -> InactiveHeads:
    """Return thresholds, shares per layer, and the agreement of scores (P3.11 to P3.20)."""
    thresholds, by_layer, masks = {}, {}, []
    for name, values in scores.items():
        side = metrics()[name].inactive or ""
        taus = {f"{share:g}": inactive_heads.threshold(values, share, side) for share in SHARES}
        mask = inactive_heads.inactive(values, taus[f"{LAYER_SHARE:g}"], side)
        thresholds[name] = taus
        by_layer[name] = to_json(inactive_heads.share_by_layer(mask, values))
        masks.append(inactive_heads.least_active(values, AGREEMENT_SHARE, side))
    agree = Agreement(list(scores), *map(to_json, inactive_heads.agreement(masks)))
    quantiles = {name: _percentiles(values) for name, values in scores.items()}
    return InactiveHeads(thresholds, by_layer, quantiles, agree)
