"""The numbers of claims.toml on inactive heads that are no loss of short texts: in a task, and in
long texts that are cut at random (P3).

Shapes: N questions or texts, P points of a curve, D draws.
"""

from typing import Any

import numpy as np

from examples.real_models.analyses import Floats, Subject
from examples.real_models.importance import DRAWS, SEED, rank_correlation
from examples.real_models.numbers import Estimate, inactive, number
from megasink.analysis.ablate.quality_curves import kept_level, removable

TASK_SCORES = ("random", "awft", "ahon_ln")


@number("task_accuracy")
def task_accuracy(subject: Subject) -> Floats:
    """Percent, with every head."""
    return 100 * subject.right(subject.on_task.unchanged)


def task_line(subject: Subject, score: str) -> tuple[Floats, Floats]:
    """Return the percentages of heads zeroed [P], and the questions answered right [P, N]: first
    with every head."""
    points = [points[0] for points in subject.on_task.line(score).values()]
    right_PN = [subject.right(point) for point in points]
    return np.array([point.zeroed or 0.0 for point in points]), 100 * np.array(right_PN)


def draws(values_PN: Floats) -> Floats:
    """Return [D, P]: means over questions drawn anew, the same of every point."""
    count = values_PN.shape[1]
    drawn_DN = np.random.default_rng(SEED).integers(count, size=(DRAWS, count))
    return values_PN[:, drawn_DN].mean(-1).T


def kept(zeroed_P: Floats, accuracy_P: Floats) -> float:
    """Return the percentage of heads that can be zeroed within a point (P3.15)."""
    found = removable(zeroed_P, accuracy_P, kept_level(float(accuracy_P[0])))
    return float(zeroed_P.max()) if found.never_left else found.percent


for _score in TASK_SCORES:

    @number(f"task_{_score}")
    def change(subject: Subject, score: str = _score) -> Floats:
        """Of the accuracy with a tenth of the heads zeroed, in points: of each question."""
        (point,) = subject.on_task.line(score)[10]
        return 100 * (subject.right(point) - subject.right(subject.on_task.unchanged))

    @number(f"task_removable_{_score}")
    def removable_on_task(subject: Subject, score: str = _score) -> Estimate:
        """Percent of heads, by the crossing of one point less (P3.15)."""
        zeroed_P, right_PN = task_line(subject, score)
        drawn = [kept(zeroed_P, accuracy_P) for accuracy_P in draws(right_PN)]
        low, high = (float(point) for point in np.quantile(drawn, (0.025, 0.975)))
        return Estimate(kept(zeroed_P, right_PN.mean(1)), (low, high), right_PN.shape[1])


for _score in ("awft", "ahon_ln"):

    @number(f"{_score}_when_cut")
    def when_cut(subject: Subject, score: str = _score) -> Floats:
        """Share of inactive heads in long texts that are cut at random."""
        return inactive(subject, score, subject.samples("cut")[score]).mean((1, 2))

    @number(f"{_score}_and_length")
    def and_length(subject: Subject, score: str = _score) -> float:
        """Rank correlation of that share with the text's length, by a threshold of these texts."""
        cut = subject.samples("cut")
        idle_N = inactive(subject, score, cut[score], by="cut").mean((1, 2))
        return rank_correlation(idle_N, cut.arrays["tokens"])


def task_curves(subject: Subject) -> dict[str, Any]:
    """Return what is drawn of the task: the accuracy, and the interval of its change added to that
    of the unchanged model."""
    curves = {}
    for score in TASK_SCORES:
        zeroed_P, right_PN = task_line(subject, score)
        change_DP = draws(right_PN - right_PN[0])
        bounds = right_PN[0].mean() + np.quantile(change_DP, (0.025, 0.975), axis=0)
        curves[score] = {
            "zeroed": zeroed_P.tolist(),
            "accuracy": right_PN.mean(1).tolist(),
            "interval": bounds.T.tolist(),
        }
    return curves


def cut_curves(subject: Subject) -> dict[str, Any]:
    """Return what is drawn of long texts that are cut: the share of inactive heads of each, by a
    threshold of these texts."""
    cut = subject.samples("cut")
    shares = {
        score: inactive(subject, score, cut[score], by="cut").mean((1, 2)).tolist()
        for score in ("awft", "ahon_ln")
    }
    return {"tokens": cut.arrays["tokens"].tolist(), **shares}
