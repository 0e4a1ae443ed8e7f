"""Thresholds for a share of heads, by the published CDF rule (P3.11).

Shapes: N samples, L layers, H heads (maximum over layers).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megasink.analysis.capture.base import Listener, OpenProbe
from megasink.analysis.folder import read_analysis
from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
from megasink.analysis.interventions.scores import RANDOM, LayerScore
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.thresholds import Scores, threshold
from megasink.errors import UserError


def threshold_of(score: str, share: float, scores_NLH: Scores) -> float:
    """Return the threshold that makes a share of all heads (not NaN), over samples, inactive."""
    check_share(share)
    if np.isinf(scores_NLH).any() or np.isnan(scores_NLH).all():
        raise UserError(f"{score}: the scores to calibrate with are not finite")
    return threshold(scores_NLH, share, metrics([score])[score].inactive or "")


def check_share(share: float) -> None:
    """Raise UserError unless a share of heads is in [0, 1]."""
    if not 0 <= share <= 1:
        raise UserError(f"share of heads {share:g}: use a number between 0 and 1")


@dataclass(frozen=True)
class Calibration:
    """Scores [N, L, H] of one model, by `megasink analyze`, with the hash of its weights."""

    folder: Path
    scores: dict[str, Scores]
    heads: list[int]
    kind: str
    weights: str

    def check(self, weights: str, heads: Sequence[int]) -> None:
        """Raise UserError unless the scores belong to the model with these weights and heads."""
        if list(heads) != self.heads:
            raise UserError(
                f"{self.folder} is the analysis of another model ({self.kind}, heads by layer "
                f"{self.heads}, not {list(heads)}): analyze this model"
            )
        if weights != self.weights:
            raise UserError(
                f"{self.folder} is the analysis of other weights ({self.kind}: another model, "
                "checkpoint or dtype): analyze this model"
            )

    def threshold(self, score: str, share: float) -> float:
        """Return the threshold of a score for a share of heads; for `random` the share itself."""
        check_share(share)
        if score == RANDOM:
            return share
        if score not in self.scores:
            raise UserError(
                f"{self.folder} has no {score}: it has {', '.join(sorted(self.scores))}"
            )
        return threshold_of(score, share, self.scores[score])


def read_calibration(folder: Path) -> Calibration:
    """Read the scores of an analysis."""
    analysis = read_analysis(folder)
    results = analysis.results
    if results.run.weights is None:
        raise UserError(
            f"{folder} does not name the weights that were analyzed: analyze the model again "
            "with this version"
        )
    return Calibration(
        folder, analysis.by_sample, results.model.heads, results.model.kind, results.run.weights
    )


def measure_scores(
    open_probe: OpenProbe,
    score: str,
    samples: Iterable[Sequence[int]],
    *,
    device: torch.device | str = "cpu",
) -> Scores:
    """Return [N, L, H]: the scores of token sequences in the unchanged model, run one by one."""
    change = DynamicChange(LayerScore(score), None, 0)
    change.keeps_scores = True
    with open_probe(Listener(), [change]) as probe:
        for tokens in samples:
            probe.forward(torch.tensor([list(tokens)], device=device), logits=False)
        return scores_of(change, probe.heads)


def scores_of(change: DynamicChange, heads: Sequence[int]) -> Scores:
    """Return the scores recorded by a change, [N, L, H]."""
    count = len(next(iter(change.scores.values()), ()))
    scores_NLH = np.full((count, len(heads), max(heads)), np.nan)
    for layer, scores in change.scores.items():
        scores_NLH[:, layer, : heads[layer]] = torch.stack(scores).cpu().numpy()
    return scores_NLH
