"""Build ablation.json from the measured points.

Shapes: L layers, H heads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import megasink
from megasink.analysis.ablate import curves
from megasink.analysis.ablate.points import MeasuredPoint, TaskScore
from megasink.analysis.ablate.results import (
    ABLATION_FORMAT,
    ALL,
    RANDOM,
    UNCHANGED,
    AblationCurve,
    AblationPoint,
    AblationResults,
    AblationValue,
    Line,
    mean_line,
)
from megasink.analysis.ablate.settings import Setting, Thresholds
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.measurements import Floats, MeasuredSample
from megasink.analysis.metrics.thresholds import Scores
from megasink.analysis.options import AblationOptions
from megasink.analysis.results import ModelFacts
from megasink.files.checked_fields import to_json

LOSS = "nats per token"


def summarize(
    options: AblationOptions,
    model: ProbedModel,
    settings: Sequence[Setting],
    keys: Sequence[str],
    measured: Sequence[MeasuredPoint],
    thresholds: Thresholds,
) -> tuple[AblationResults, dict[str, NDArray[Any]]]:
    """Return the contents of ablation.json and points.npz; the first point is unchanged."""
    points = [
        AblationPoint(
            row=setting.row,
            label=setting.label,
            asked=setting.asked,
            seed=setting.seed,
            interventions=to_json(setting.entries),
            zeroed=_percent(point.zeroed, setting.zeroed_LH),
            values=_values(point, measured[0]),
            key=key,
        )
        for setting, key, point in zip(settings, keys, measured, strict=True)
    ]
    arrays = {
        setting.label: np.asarray(mask, dtype=np.float64)
        for setting, point in zip(settings, measured, strict=True)
        if (mask := point.zeroed_LH if setting.zeroed_LH is None else setting.zeroed_LH) is not None
    }
    is_task = bool(measured[0].tasks)
    results = AblationResults(
        format=ABLATION_FORMAT,
        megasink=megasink.__version__,
        torch=torch.__version__,
        model=ModelFacts(**model.facts, layers=len(model.heads), heads=model.heads),
        data=[str(source) for source in options.data],
        data_sha256=measured[0].facts.get("texts"),
        tasks={name: score.version for name, score in measured[0].tasks.items()},
        samples=len(measured[0].texts) or None,
        quantity=" and ".join({score.metric: 0 for score in measured[0].tasks.values()}) or LOSS,
        higher_is_better=is_task,
        tolerance=curves.ACCURACY_TOLERANCE if is_task else curves.LOSS_TOLERANCE,
        calibration=_calibration(options) if thresholds else None,
        thresholds=thresholds,
        points=points,
        curves=[],
    )
    of = dict(zip((point.label for point in points), measured, strict=True))
    for on in results.unchanged.values:
        made = _curves(results, [RANDOM, *thresholds] if thresholds else [], on)
        for curve in made[1:]:
            curve.over_random, curve.over_random_interval = _over_random(results, curve, of)
        results.curves += made
    return results, arrays


def _percent(zeroed: float | None, zeroed_LH: Scores | None) -> float | None:
    """Return the percentage of heads zeroed: the mean over layers with heads (P3.13)."""
    if zeroed_LH is not None:
        there = ~np.isnan(zeroed_LH).all(1)
        zeroed = float(np.nanmean(zeroed_LH[there], 1).mean())
    return None if zeroed is None else 100 * zeroed


def _calibration(options: AblationOptions) -> str:
    return str(options.calibration or " ".join(map(str, options.data)))


def _values(point: MeasuredPoint, unchanged: MeasuredPoint) -> dict[str, AblationValue]:
    """Return the results of a point by dataset or task, and on all texts."""
    values = {
        name: AblationValue(
            value=score.value,
            change=_less(score.value, unchanged.tasks[name].value),
            standard_error=_paired_error(score, unchanged.tasks[name]),
            bits_per_byte=None,
            samples=score.samples,
        )
        for name, score in point.tasks.items()
    }
    names = list(dict.fromkeys(text.dataset for text in point.texts))
    for name in names:
        chosen = [i for i, text in enumerate(point.texts) if text.dataset == name]
        values[name] = _loss(point.texts, unchanged.texts, chosen)
    if len(names) > 1:
        values[ALL] = _loss(point.texts, unchanged.texts, range(len(point.texts)))
    return values


def _paired_error(score: TaskScore, before: TaskScore) -> float | None:
    """Return the standard error of the change from the unchanged model, paired by question.

    None if it has no such differences: for a single question, and where the score is not the mean
    of the questions'.
    """
    ours, theirs = _of_each(score), _of_each(before)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return _finite(curves.ratio_error(ours - theirs, np.ones(len(ours))))


def _of_each(score: TaskScore) -> Floats | None:
    """Return the percentage of each question; None if the score is not their mean."""
    found = 100 * np.asarray(score.of_each, dtype=np.float64)
    if not len(found) or score.value is None:
        return None
    return found if math.isclose(found.mean(), score.value, abs_tol=1e-6) else None


def _over_random(
    results: AblationResults, curve: AblationCurve, of: Mapping[str, MeasuredPoint]
) -> tuple[float | None, float | None]:
    """Return the AUC of a score minus the random baseline's, and its confidence interval.

    An AUC is a weighted mean of points, so each text or question has its own. The random heads of
    each are drawn by themselves, so that their scatter is in the differences.
    """
    area: list[Floats] = []
    for score in (curve.score, RANDOM):
        line = results.line(score)
        weights = curves.auc_weights(mean_line(line, curve.on)[0])
        for weight, points in zip(weights, line.values(), strict=True):
            for point in points:
                values = _items(of[point.label], curve.on)
                if values is None:
                    return None, None
                sign = 1 if score == curve.score else -1
                area.append(sign * weight / len(points) * values)
    if len({len(values) for values in area}) > 1:
        return None, None
    texts = [float(text.targets or 0) for text in _texts(of[UNCHANGED], curve.on)]
    sizes = np.asarray(texts or [1.0] * len(area[0]), dtype=np.float64)
    together = len(results.thresholds)
    apart, interval = curves.interval(np.sum(area, 0), sizes, together)
    return _finite(apart), _finite(interval)


def _texts(point: MeasuredPoint, on: str) -> list[MeasuredSample]:
    return [text for text in point.texts if on in (ALL, text.dataset)]


def _items(point: MeasuredPoint, on: str) -> Floats | None:
    """Return the summed loss of each text, or the percentage of each question."""
    if on in point.tasks:
        return _of_each(point.tasks[on])
    nats = [math.nan if text.nats is None else text.nats for text in _texts(point, on)]
    return np.asarray(nats, dtype=np.float64)


def _less(value: float | None, before: float | None) -> float | None:
    return None if value is None or before is None else value - before


def _loss(
    texts: Sequence[MeasuredSample], before: Sequence[MeasuredSample], chosen: Sequence[int]
) -> AblationValue:
    """Return the loss of some texts, over all their targets."""
    nats, was, targets = (
        np.asarray([math.nan if x is None else x for x in column], dtype=np.float64)
        for column in zip(
            *((texts[i].nats, before[i].nats, texts[i].targets) for i in chosen), strict=True
        )
    )
    change = (nats - was).sum() / targets.sum()
    of_bytes = [(texts[i].nats_of_bytes, texts[i].bytes) for i in chosen]
    bits = None
    if not any(None in pair for pair in of_bytes):
        total, size = (math.fsum(x for x in column if x) for column in zip(*of_bytes, strict=True))
        bits = total / (math.log(2) * size) if size else None
    value: AblationValue = AblationValue(
        value=_finite(nats.sum() / targets.sum()),
        change=_finite(change),
        standard_error=_finite(curves.ratio_error(nats - was, targets)),
        bits_per_byte=bits,
        samples=len(nats),
    )
    return value


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _curves(results: AblationResults, scores: Sequence[str], on: str) -> list[AblationCurve]:
    """Return the curves on a dataset or task, with their ranks."""
    better = results.higher_is_better
    baseline = results.unchanged.number(on)
    level = curves.kept_level(baseline, higher_is_better=better)
    made = []
    for score in scores:
        line = results.line(score)
        x, y = mean_line(line, on)
        removable = curves.removable(x, y, level, higher_is_better=better)
        made.append(
            AblationCurve(
                score=score,
                on=on,
                auc=_auc(x, y, better),
                rank=0,
                removable=removable.percent,
                never_left=removable.never_left,
                measured_to=float(max(x)),
                auc_by_seed=_by_seed(line, on, better) if score == RANDOM else {},
            )
        )
    worst = -math.inf if better else math.inf
    aucs: Mapping[str, float] = {c.score: worst if c.auc is None else c.auc for c in made}
    for curve in made:
        curve.rank = curves.ranks(aucs, higher_is_better=better)[curve.score]
    return made


def _auc(x: Sequence[float], y: Sequence[float], better: bool) -> float | None:
    return _finite(curves.normalized_auc(x, y, worst=0.0 if better else math.inf))


def _by_seed(line: Line, on: str, better: bool) -> dict[str, float | None]:
    lines = {}
    for seed in dict.fromkeys(point.seed for points in line.values() for point in points):
        if seed is None:
            continue
        of = {
            asked: [p for p in points if p.seed in (seed, None)] for asked, points in line.items()
        }
        lines[str(seed)] = _auc(*mean_line(of, on), better)
    return lines
