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
    AblationCurve,
    AblationPoint,
    AblationResults,
    AblationValue,
    Line,
    mean_line,
)
from megasink.analysis.ablate.settings import Setting, Thresholds
from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.measurements import MeasuredSample
from megasink.analysis.options import AblationOptions
from megasink.analysis.results import ModelFacts
from megasink.typed_json import to_json

LOSS = "nats per token"


def summarize(
    options: AblationOptions,
    model: ProbedModel,
    settings: Sequence[Setting],
    keys: Sequence[str],
    measured: Sequence[MeasuredPoint],
    thresholds: Thresholds,
) -> tuple[AblationResults, dict[str, NDArray[Any]]]:
    """Return the contents of ablation.json and of points.npz.

    Args:
        settings, keys, measured: of every point, the unchanged model first.
    """
    points = [
        AblationPoint(
            row=setting.row,
            label=setting.label,
            asked=setting.asked,
            seed=setting.seed,
            interventions=to_json(setting.entries),
            zeroed=None if point.zeroed is None else 100 * point.zeroed,
            values=_values(point, measured[0]),
            key=key,
        )
        for setting, key, point in zip(settings, keys, measured, strict=True)
    ]
    arrays = {
        setting.label: np.asarray(point.zeroed_LH, dtype=np.float64)
        for setting, point in zip(settings, measured, strict=True)
        if point.zeroed_LH is not None
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
    for on in results.unchanged.values:
        results.curves += _curves(results, [RANDOM, *thresholds] if thresholds else [], on)
    return results, arrays


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
    ours, theirs = (100 * np.asarray(s.of_each, dtype=np.float64) for s in (score, before))
    count = len(ours)
    if count < 2 or count != len(theirs):
        return None
    for found, of in ((ours, score), (theirs, before)):
        if of.value is None or not math.isclose(found.mean(), of.value, abs_tol=1e-6):
            return None
    return float((ours - theirs).std(ddof=1) / math.sqrt(count))


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
    # Of a ratio of sums over samples: of the change on each, less what its targets would predict.
    residual = nats - was - change * targets
    count = len(residual)
    error = math.sqrt((residual**2).sum() * count / max(1, count - 1)) / targets.sum()
    of_bytes = [(texts[i].nats_of_bytes, texts[i].bytes) for i in chosen]
    bits = None
    if not any(None in pair for pair in of_bytes):
        total, size = (math.fsum(x for x in column if x) for column in zip(*of_bytes, strict=True))
        bits = total / (math.log(2) * size) if size else None
    value: AblationValue = AblationValue(
        value=_finite(nats.sum() / targets.sum()),
        change=_finite(change),
        standard_error=_finite(error) if count > 1 else None,
        bits_per_byte=bits,
        samples=count,
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
