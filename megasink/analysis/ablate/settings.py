"""The points of a sweep and their interventions.

Shapes: N samples, L layers, H heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megasink.analysis.ablate.calibration import threshold_of
from megasink.analysis.ablate.results import RANDOM, UNCHANGED
from megasink.analysis.heads import heads_of
from megasink.analysis.interventions.dynamic_zeroing import DynamicZeroing
from megasink.analysis.interventions.kinds import (
    Intervention,
    ZeroHeads,
    read_interventions,
    to_entry,
)
from megasink.analysis.interventions.scores import is_of_all_texts
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.thresholds import Scores, inactive
from megasink.analysis.options import AblationOptions
from megasink.errors import UserError

HEADS, FILE = "--heads", "--interventions"

Thresholds = dict[str, dict[str, float]]
"""Score -> percentage asked for -> threshold."""


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
    """Return every point, the unchanged model first; arguments as in `thresholds_of`.

    The random baseline zeroes each head of each sample with the probability asked for, whatever
    the texts (P3.9); at 0 % it is the unchanged model.
    """
    settings = [Setting(UNCHANGED, UNCHANGED)]
    if options.score:
        for seed in options.seeds:
            for percent in filter(None, options.zeroed):
                change = DynamicZeroing(score=RANDOM, threshold=percent / 100, seed=seed)
                label = f"{RANDOM}/{percent:g}/seed {seed}"
                settings.append(Setting(RANDOM, label, (change,), percent, seed))
    for score, taus in thresholds.items():
        for percentage, tau in taus.items():
            label = f"{score}/{percentage}"
            if is_of_all_texts(score):
                changes, mask_LH = _fixed(score, tau, mean_of(scores[score]))
            else:
                changes, mask_LH = (DynamicZeroing(score=score, threshold=tau),), None
            settings.append(Setting(score, label, changes, float(percentage), None, mask_LH))
    if options.heads:
        chosen = ZeroHeads(**heads_of(options.heads)._asdict())
        settings.append(Setting(HEADS, f"heads {', '.join(options.heads)}", (chosen,)))
    if options.interventions is not None:
        changes = tuple(read_interventions(options.interventions))
        settings.append(Setting(FILE, str(options.interventions), changes))
    if options.layer is not None:
        settings += _single_heads(options.layer, heads)
    return settings


def _fixed(
    score: str, tau: float, mean_LH: Scores
) -> tuple[tuple[Intervention, ...], Scores | None]:
    """Return the intervention that zeroes heads beyond a threshold everywhere, and their mask."""
    mask_LH = inactive(mean_LH, tau, metrics()[score].inactive or "")
    chosen = tuple((int(layer), int(head)) for layer, head in np.argwhere(mask_LH))
    return (ZeroHeads(chosen),) * bool(chosen), np.where(np.isnan(mean_LH), np.nan, mask_LH)


def _single_heads(layer: int, heads: Sequence[int]) -> Iterator[Setting]:
    """Yield a point for each head of a layer, with only that head zeroed (P4.7)."""
    for head in range(heads[layer]):
        name = f"{layer}.{head}"
        yield Setting(f"layer {layer}", f"head {name}", (ZeroHeads(((layer, head),)),))
