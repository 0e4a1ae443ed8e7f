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
from megasink.analysis.ablate import quality_curves
from megasink.analysis.ablate.measured_points import MeasuredPoint, TaskScore
from megasink.analysis.ablate.settings import Setting, Thresholds
from megasink.analysis.capture.measurements import Floats, MeasuredSample
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.options import AblationOptions
from megasink.analysis.result_schemas import (
    ABLATION_FORMAT,
    ALL,
    RANDOM,
    UNCHANGED,
    AblationCurve,
    AblationPoint,
    AblationResults,
    AblationValue,
    Line,
    ModelFacts,
    mean_line,
)
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
    points, arrays, unchanged = [], {}, measured[0]
    for setting, key, point in zip(settings, keys, measured, strict=True):
        mask_LH, zeroed = setting.zeroed_LH, point.zeroed
        if mask_LH is not None:  # the mean over layers with heads (P3.13)
            there = ~np.isnan(mask_LH).all(1)
            zeroed = float(np.nanmean(mask_LH[there], 1).mean())
        elif point.zeroed_LH is not None:
            mask_LH = np.asarray(point.zeroed_LH, dtype=np.float64)
        if mask_LH is not None:
            arrays[setting.label] = np.asarray(mask_LH, dtype=np.float64)
        points.append(
            AblationPoint(
                row=setting.row,
                label=setting.label,
                asked=setting.asked,
                seed=setting.seed,
                interventions=to_json(setting.entries),
                zeroed=None if zeroed is None else 100 * zeroed,
                values=_values(point, unchanged),
                key=key,
            )
        )
    is_task, texts = bool(unchanged.tasks), " ".join(map(str, options.data))
    results = AblationResults(
        format=ABLATION_FORMAT,
        megasink=megasink.__version__,
        torch=torch.__version__,
        model=ModelFacts(**model.facts, layers=len(model.heads), heads=model.heads),
        data=[str(source) for source in options.data],
        data_sha256=unchanged.facts.get("texts"),
        tasks={name: score.version for name, score in unchanged.tasks.items()},
        samples=len(unchanged.texts) or None,
        quantity=" and ".join({score.metric: 0 for score in unchanged.tasks.values()}) or LOSS,
        higher_is_better=is_task,
        tolerance=quality_curves.ACCURACY_TOLERANCE if is_task else quality_curves.LOSS_TOLERANCE,
        calibration=str(options.calibration or texts) if thresholds else None,
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


def _values(point: MeasuredPoint, unchanged: MeasuredPoint) -> dict[str, AblationValue]:
    """Return the results of a point by dataset or task, and on all texts."""
    values = {}
    for name, score in point.tasks.items():
        before = unchanged.tasks[name]
        known = score.value is not None and before.value is not None
        values[name] = AblationValue(
            value=score.value,
            change=score.value - before.value if known else None,  # type: ignore[operator]
            standard_error=_paired_error(score, before),
            bits_per_byte=None,
            samples=score.samples,
        )
    names = list(dict.fromkeys(text.dataset for text in point.texts))
    for name in (*names, *[ALL] * (len(names) > 1)):
        values[name] = _loss(_texts(point, name), _texts(unchanged, name))
    return values


def _paired_error(score: TaskScore, before: TaskScore) -> float | None:
    """Return the standard error of the change, paired by question; None if it has no such pairs."""
    ours, theirs = _of_each(score), _of_each(before)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return _finite(quality_curves.ratio_error(ours - theirs, np.ones(len(ours))))


def _of_each(score: TaskScore) -> Floats | None:
    """Return the percentage of each question; None if the score is not their mean."""
    found = 100 * np.asarray(score.of_each, dtype=np.float64)
    if not len(found) or score.value is None:
        return None
    return found if math.isclose(found.mean(), score.value, abs_tol=1e-6) else None


def _over_random(
    results: AblationResults, curve: AblationCurve, of: Mapping[str, MeasuredPoint]
) -> tuple[float | None, float | None]:
    """Return the AUC of a score minus the random baseline's, and its confidence interval."""
    # An AUC is a weighted mean of points, so each text or question has its own.
    area: list[Floats] = []
    for score in (curve.score, RANDOM):
        line = results.line(score)
        weights = quality_curves.auc_weights(mean_line(line, curve.on)[0])
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
    apart, interval = quality_curves.interval(np.sum(area, 0), sizes, len(results.thresholds))
    return _finite(apart), _finite(interval)


def _texts(point: MeasuredPoint, on: str) -> list[MeasuredSample]:
    return [text for text in point.texts if on in (ALL, text.dataset)]


def _items(point: MeasuredPoint, on: str) -> Floats | None:
    """Return the summed loss of each text, or the percentage of each question."""
    if on in point.tasks:
        return _of_each(point.tasks[on])
    return np.asarray([text.nats for text in _texts(point, on)], dtype=np.float64)  # None: NaN


def _loss(texts: Sequence[MeasuredSample], before: Sequence[MeasuredSample]) -> AblationValue:
    """Return the loss of some texts, over all their targets."""
    nats, targets = (
        np.asarray([getattr(text, name) for text in texts], dtype=np.float64)
        for name in ("nats", "targets")
    )
    moved = nats - np.asarray([text.nats for text in before], dtype=np.float64)
    of_bytes, bits = [(text.nats_of_bytes, text.bytes) for text in texts], None
    if not any(None in pair for pair in of_bytes):
        total, size = (math.fsum(x for x in column if x) for column in zip(*of_bytes, strict=True))
        bits = total / (math.log(2) * size) if size else None
    return AblationValue(
        value=_finite(nats.sum() / targets.sum()),
        change=_finite(moved.sum() / targets.sum()),
        standard_error=_finite(quality_curves.ratio_error(moved, targets)),
        bits_per_byte=bits,
        samples=len(nats),
    )


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _curves(results: AblationResults, scores: Sequence[str], on: str) -> list[AblationCurve]:
    """Return the curves on a dataset or task, with their ranks."""
    better = results.higher_is_better
    level = quality_curves.kept_level(results.unchanged.number(on), higher_is_better=better)
    worst, made = -math.inf if better else math.inf, []
    for score in scores:
        line = results.line(score)
        x, y = mean_line(line, on)
        removable = quality_curves.removable(x, y, level, higher_is_better=better)
        by_seed = {}
        for seed in dict.fromkeys(p.seed for p in results.of(score) if p.seed is not None):
            of: Line = {
                asked: [p for p in points if p.seed in (seed, None)]
                for asked, points in line.items()
            }
            by_seed[str(seed)] = _auc(*mean_line(of, on), better)
        made.append(
            AblationCurve(
                score=score,
                on=on,
                auc=_auc(x, y, better),
                rank=0,
                removable=removable.percent,
                never_left=removable.never_left,
                measured_to=float(max(x)),
                auc_by_seed=by_seed if score == RANDOM else {},
            )
        )
    aucs: Mapping[str, float] = {c.score: worst if c.auc is None else c.auc for c in made}
    for curve in made:
        curve.rank = quality_curves.ranks(aucs, higher_is_better=better)[curve.score]
    return made


def _auc(x: Sequence[float], y: Sequence[float], better: bool) -> float | None:
    return _finite(quality_curves.normalized_auc(x, y, worst=0.0 if better else math.inf))
