"""The points of a sweep, their interventions, and thresholds by the published CDF rule (P3.11).

Shapes: N samples, L layers, H heads (maximum over layers).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.capture.probe import Listener, OpenProbe
from megasink.analysis.heads import heads_of
from megasink.analysis.interventions.dynamic_zeroing import (
    DynamicChange,
    DynamicZeroing,
    LayerScore,
    is_of_all_texts,
)
from megasink.analysis.interventions.intervention_types import (
    Intervention,
    ZeroHeads,
    read_interventions,
    to_entry,
)
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.inactive_heads import Scores, inactive, threshold
from megasink.analysis.options import AblationOptions
from megasink.analysis.result_schemas import RANDOM, UNCHANGED
from megasink.errors import UserError


def threshold_of(score: str, share: float, scores_NLH: Scores) -> float:
    """Return the threshold that makes a share of all heads (not NaN), over samples, inactive."""
    check_share(share)
    if np.isinf(scores_NLH).any() or np.isnan(scores_NLH).all():
        raise UserError(f"{score}: calibration scores are infinite or all NaN: use other texts")
    return threshold(scores_NLH, share, metrics([score])[score].inactive or "")


def check_share(share: float) -> None:
    """Raise UserError unless a share of heads is in [0, 1]."""
    if not 0 <= share <= 1:
        raise UserError(f"share of heads {share:g}: use a number between 0 and 1")


def read_calibration(
    folder: Path, weights: str | None = None, heads: Sequence[int] = ()
) -> dict[str, Scores]:
    """Return the scores [N, L, H] of an analysis; given weights and heads must be the model's."""
    analysis = read_analysis(folder)
    model, own = analysis.results.model, analysis.results.run.weights
    if own is None:
        raise UserError(
            f"{folder} does not record the weights that were analyzed: analyze the model again "
            "with this version"
        )
    if weights is not None and list(heads) != model.heads:
        raise UserError(
            f"{folder} is the analysis of another model ({model.kind}, heads by layer "
            f"{model.heads}, not {list(heads)}): analyze this model"
        )
    if weights is not None and weights != own:
        raise UserError(
            f"{folder} is the analysis of other weights ({model.kind}: another model, checkpoint "
            "or dtype): analyze this model"
        )
    return analysis.by_sample


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


HEADS, FILE = "--heads", "--interventions"

Thresholds = dict[str, dict[str, float]]
"""Score -> requested percentage -> threshold."""


@dataclass(frozen=True)
class Setting:
    """One point of a sweep."""

    # row, label, asked, seed: as in `AblationPoint`.
    row: str
    label: str
    interventions: tuple[Intervention, ...] = ()  # applied in order
    asked: float | None = None
    seed: int | None = None
    # 1 for the heads that a score zeroes in every sequence; None where the interventions count
    # them.
    zeroed_LH: Scores | None = None

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The interventions as JSON."""
        return [to_entry(intervention) for intervention in self.interventions]


def thresholds_of(
    scores: Mapping[str, Scores], names: Sequence[str], percents: Sequence[float], where: str
) -> Thresholds:
    """Return thresholds by the published rule (P3.11) from scores [N, L, H]."""
    thresholds: Thresholds = {}
    for name in names:
        if name not in scores:
            raise UserError(
                f"--score {name}: {where} has no such score; it has {', '.join(scores) or 'none'}"
            )
        low, high = metrics()[name].bounds  # rounding may lead beyond them
        values = mean_of(scores[name]) if is_of_all_texts(name) else scores[name]
        taus = {p: threshold_of(name, p / 100, values) for p in percents}
        thresholds[name] = {f"{p:g}": min(max(tau, low), high) for p, tau in taus.items()}
    return thresholds


def mean_of(scores_NLH: Scores) -> Scores:
    """Return [L, H]: the mean over samples; NaN where there is no head."""
    return np.where(np.isnan(scores_NLH).all(0), np.nan, np.nansum(scores_NLH, 0) / len(scores_NLH))


def settings_of(
    options: AblationOptions,
    heads: Sequence[int],
    thresholds: Thresholds,
    scores: Mapping[str, Scores],
) -> list[Setting]:
    """Return every point, the unchanged model first, which is the random baseline at 0 %."""
    settings = [Setting(UNCHANGED, UNCHANGED)]
    if options.score:
        for seed in options.seeds:  # heads of each sample with this probability (P3.9)
            for percent in filter(None, options.zeroed):
                change = DynamicZeroing(score=RANDOM, threshold=percent / 100, seed=seed)
                label = f"{RANDOM}/{percent:g}/seed {seed}"
                settings.append(Setting(RANDOM, label, (change,), percent, seed))
    for score, taus in thresholds.items():
        for percentage, tau in taus.items():
            changes: tuple[Intervention, ...]
            mask_LH = None
            if not is_of_all_texts(score):
                changes = (DynamicZeroing(score=score, threshold=tau),)
            else:
                mean_LH = mean_of(scores[score])
                beyond_LH = inactive(mean_LH, tau, metrics()[score].inactive or "")
                chosen = tuple((int(layer), int(head)) for layer, head in np.argwhere(beyond_LH))
                changes = (ZeroHeads(chosen),) * bool(chosen)
                mask_LH = np.where(np.isnan(mean_LH), np.nan, beyond_LH)
            label = f"{score}/{percentage}"
            settings.append(Setting(score, label, changes, float(percentage), None, mask_LH))
    if options.heads:
        zeroed = ZeroHeads(**heads_of(options.heads)._asdict())
        settings.append(Setting(HEADS, f"heads {', '.join(options.heads)}", (zeroed,)))
    if options.interventions is not None:
        changes = tuple(read_interventions(options.interventions))
        settings.append(Setting(FILE, str(options.interventions), changes))
    if (layer := options.layer) is not None:  # each head by itself (P4.7)
        for head in range(heads[layer]):
            alone = (ZeroHeads(((layer, head),)),)
            settings.append(Setting(f"layer {layer}", f"head {layer}.{head}", alone))
    return settings
