"""Dataclasses of ablation.json; docs/interventions.md explains them.

Values by layer and head are nested lists, with null for missing heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megasink.analysis.results import ModelFacts

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

    def number(self, on: str) -> float:
        """Return the value on a dataset or task; NaN if there is none."""
        value = self.values[on].value
        return math.nan if value is None else value


Line = dict[float, list[AblationPoint]]
"""The points of one score by the percentage asked for; several are those of several seeds."""


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
        """Return the points of a score, with the unchanged model if no point was measured at 0 %.

        Curves that begin at different percentages have areas that cannot be compared.
        """
        line: Line = {}
        for point in self.of(score):
            if point.asked is not None:
                line.setdefault(point.asked, []).append(point)
        line.setdefault(0.0, [self.unchanged])
        return dict(sorted(line.items()))
