"""Claims of the papers, and the verdicts that runs pass on them.

A claim is data (`[[claim]]` of experiment.toml), its kind a record of the keys it has and the test
that decides it. Every test is one-sided, paired by seed, and made in both directions: for the claim
and against it. The runs of a seed share initial weights, batches and validation samples, so a
difference between cells is taken seed by seed. The p-values of an experiment's claims are corrected
together, each direction on its own, by the procedure of Benjamini and Hochberg: of the claims said
to reproduce, at most 5% are expected to do so by chance, however many are tested.

Shapes: N seeds, C cells.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from megasink.errors import unknown_name

LEVEL = 0.05
LEAST_SEEDS = 3
REPRODUCES = "reproduces"
OPPOSITE = "opposite"
NOT_SHOWN = "does not show at this scale"
NOT_MEASURED = "not measured"

Claim = Mapping[str, Any]
Values = Mapping[str, Mapping[str, Sequence[float | None]]]
"""cell -> metric -> value by seed; None where a run has none, as after a divergence."""
Floats = NDArray[np.float64]

AT = re.compile(r"(?P<curve>.+)@(?P<percent>\d+(?:\.\d+)?)%")
"""A point of a curve: imbalance@25% is the imbalance after a quarter of the steps."""


@dataclass(frozen=True)
class Side:
    """What a claim compares: the mean of a metric over some cells, by seed."""

    name: str
    cells: tuple[str, ...]
    metric: str


@dataclass(frozen=True)
class Tested:
    """What a test found.

    Attributes:
        effect: the statistic of the kind; positive if it points in the direction of the claim.
        low, high: its 95% interval; None if it has none.
        p: probability of this effect or a larger one if there is none.
        against: the same for the opposite direction.
    """

    effect: float
    low: float | None
    high: float | None
    p: float
    against: float


@dataclass(frozen=True)
class Kind:
    """A kind of claim.

    Attributes:
        keys: each a choice of keys, of which a claim has exactly one.
        effect, test_name: what the statistic and the test are called.
        sides: what a claim compares.
        test: the test, on the values by seed of each side.
        paired: a seed counts only if all sides have a number.
        least_sides: of a list of cells.
    """

    keys: tuple[tuple[str, ...], ...]
    effect: str
    test_name: str
    sides: Callable[[Claim], list[Side]]
    test: Callable[[Claim, list[Floats]], Tested]
    paired: bool = False
    least_sides: int = 1

    def fits(self, claim: Claim) -> bool:
        """Return whether a claim has the keys of this kind, and none of another."""
        known = {key for choice in self.keys for key in choice} | COMMON
        one_each = all(sum(key in claim for key in choice) == 1 for choice in self.keys)
        return one_each and claim.keys() <= known


@dataclass(kw_only=True)
class Verdict:
    """A claim, and what the runs say.

    Attributes:
        says, paper: of the claim.
        compared: side -> its values by seed.
        effect: name of the statistic; difference: its value, positive in the claim's direction.
        low, high: the 95% interval of the difference, without correction.
        test: name of the test; p: one-sided, of the side that the verdict is on.
        corrected: p corrected for the number of claims.
        verdict: one of the four above.
    """

    says: str
    paper: str | None
    metric: str
    compared: dict[str, list[float | None]]
    effect: str
    difference: float | None
    low: float | None
    high: float | None
    test: str
    p: float | None
    corrected: float | None
    verdict: str


def _cells(of: str | Sequence[str]) -> tuple[str, ...]:
    return (of,) if isinstance(of, str) else tuple(of)


def _side(claim: Claim, key: str, metric: str = "metric") -> Side:
    cells = _cells(claim[key])
    name = " and ".join(cells)
    return Side(name if metric == "metric" else f"{claim[metric]}: {name}", cells, claim[metric])


def _ordered(claim: Claim) -> list[Side]:
    cells = claim.get("increasing") or claim["decreasing"]
    return [Side(cell, (cell,), claim["metric"]) for cell in cells]


def _of_t_test(effect: float, constant: bool, test: Callable[..., Any]) -> Tested:
    """Return the result of a t-test; without any spread, the sign of the effect decides."""
    if constant:
        p = 0.5 if effect == 0 else float(effect < 0)
        return Tested(effect, effect, effect, p, 1 - p)
    low, high = (float(bound) for bound in test(alternative="two-sided").confidence_interval(0.95))
    p, against = (float(test(alternative=side).pvalue) for side in ("greater", "less"))
    return Tested(effect, low, high, p, against)


def _one_sample(values_N: Floats) -> Tested:
    return _of_t_test(
        float(values_N.mean()),
        bool(np.ptp(values_N) == 0),
        lambda alternative: stats.ttest_1samp(values_N, 0.0, alternative=alternative),
    )


def _paired(claim: Claim, sides: list[Floats]) -> Tested:
    lower_N, higher_N = sides
    return _one_sample(higher_N - lower_N)


def _equivalence(claim: Claim, sides: list[Floats]) -> Tested:
    """Two one-sided t-tests of paired differences against the margin (Schuirmann 1987).

    The effect is the margin minus the mean difference's size, its interval that of the difference.
    The opposite, a difference beyond the margin, is tested on the side that the mean is on.
    """
    first_N, second_N = sides
    differences_N = second_N - first_N
    sign = 1.0 if differences_N.mean() >= 0 else -1.0
    left = _one_sample(float(claim["within"]) - sign * differences_N)
    apart = _one_sample(differences_N)
    return Tested(left.effect, apart.low, apart.high, left.p, left.against)


def _threshold(claim: Claim, sides: list[Floats]) -> Tested:
    (values_N,) = sides
    above = "above" in claim
    return _one_sample(values_N - claim["above"] if above else claim["below"] - values_N)


def _trend(claim: Claim, sides: list[Floats]) -> Tested:
    """Page's test: cells in order within each seed; the effect is the mean of Kendall's tau."""
    values_NC = np.stack(sides, axis=1) * (1 if "increasing" in claim else -1)
    if np.ptp(values_NC, axis=1).max() == 0:
        return Tested(0.0, None, None, 0.5, 0.5)
    order = range(values_NC.shape[1])
    taus = [stats.kendalltau(order, row).statistic for row in values_NC if np.ptp(row) > 0]
    p, against = (
        float(stats.page_trend_test(data).pvalue) for data in (values_NC, values_NC[:, ::-1])
    )
    return Tested(float(np.mean(taus)), None, None, p, against)


COMMON = {"says", "paper", "forms"}
KINDS = {
    "two cells": Kind(
        keys=(("metric",), ("lower",), ("higher",)),
        effect="difference",
        test_name="paired t-test",
        sides=lambda claim: [_side(claim, "lower"), _side(claim, "higher")],
        test=_paired,
        paired=True,
    ),
    "a number": Kind(
        keys=(("metric",), ("cell",), ("above", "below")),
        effect="distance",
        test_name="one-sample t-test",
        sides=lambda claim: [_side(claim, "cell")],
        test=_threshold,
    ),
    "the same": Kind(
        keys=(("metric",), ("first",), ("second",), ("within",)),
        effect="margin left",
        test_name="two one-sided paired t-tests",
        sides=lambda claim: [_side(claim, "first"), _side(claim, "second")],
        test=_equivalence,
        paired=True,
    ),
    "a trend": Kind(
        keys=(("metric",), ("increasing", "decreasing")),
        effect="mean of Kendall's tau",
        test_name="Page's test",
        sides=_ordered,
        test=_trend,
        paired=True,
        least_sides=3,
    ),
    "two metrics": Kind(
        keys=(("cell",), ("lower_metric",), ("higher_metric",)),
        effect="difference",
        test_name="paired t-test",
        sides=lambda claim: [
            _side(claim, "cell", "lower_metric"),
            _side(claim, "cell", "higher_metric"),
        ],
        test=_paired,
        paired=True,
    ),
}


def kind_of(claim: Claim) -> Kind | None:
    """Return the kind of a claim by its keys; None if there is none."""
    return next((kind for kind in KINDS.values() if kind.fits(claim)), None)


def problems(
    claims: Sequence[Claim], cells: Sequence[str], metrics: Sequence[str], curves: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong with claims of runs with these cells, metrics and curves (for `AT`)."""
    for number, claim in enumerate(claims, 1):
        found = dict.fromkeys(_claim_problems(claim, cells, metrics, curves))
        yield from (f"claim {number}: {problem}" for problem in found)


def _claim_problems(
    claim: Claim, cells: Sequence[str], metrics: Sequence[str], curves: Sequence[str]
) -> Iterator[str]:
    kind = kind_of(claim)
    if not isinstance(claim.get("says"), str) or kind is None:
        kinds = [", ".join(" or ".join(of) for of in kind.keys) for kind in KINDS.values()]
        yield f"it has the keys {', '.join(sorted(claim))}: use says, and {'; '.join(kinds)}"
        return
    sides = kind.sides(claim)
    if len(sides) < kind.least_sides:
        yield f"it compares {len(sides)} cells: use {kind.least_sides} or more"
    for side in sides:
        for cell in side.cells:
            if cell not in cells:
                yield unknown_name("cell", cell, list(cells))
        at = AT.fullmatch(side.metric)
        if at and at["curve"] not in curves:
            yield unknown_name("curve", at["curve"], list(curves))
        if at and float(at["percent"]) > 100:
            yield f"{side.metric} lies beyond the last step: 100% or less"
        if not at and side.metric not in metrics:
            yield unknown_name("metric", side.metric, list(metrics))


def metrics_of(claims: Sequence[Claim]) -> list[str]:
    """Return the metrics that claims compare, points of curves included."""
    kinds = [(claim, kind_of(claim)) for claim in claims]
    return list(dict.fromkeys(s.metric for claim, kind in kinds if kind for s in kind.sides(claim)))


def verdicts(claims: Sequence[Claim], values: Values) -> list[Verdict]:
    """Return the verdict on each claim, corrected for their number.

    Raises:
        ValueError: there are fewer than three seeds.
    """
    made, tested = [], []
    for claim in claims:
        kind = kind_of(claim)
        assert kind is not None, "problems() comes first"
        sides = kind.sides(claim)
        by_seed = [_by_seed(side, values) for side in sides]
        seeds = min(len(side_N) for side_N in by_seed)
        if seeds < LEAST_SEEDS:
            raise ValueError(f"{claim['says']}: {seeds} seeds; a verdict takes {LEAST_SEEDS}")
        there = [np.isfinite(side_N) for side_N in by_seed]
        if kind.paired:
            there = [np.all(there, axis=0)] * len(sides)
        finite = [side_N[is_N] for side_N, is_N in zip(by_seed, there, strict=True)]
        enough = min(map(len, finite)) >= LEAST_SEEDS
        found = kind.test(claim, finite) if enough else None
        tested.append(found)
        made.append(
            Verdict(
                says=claim["says"],
                paper=claim.get("paper"),
                metric=", ".join(dict.fromkeys(side.metric for side in sides)),
                compared={
                    side.name: [float(x) if np.isfinite(x) else None for x in side_N]
                    for side, side_N in zip(sides, by_seed, strict=True)
                },
                effect=kind.effect,
                difference=found and found.effect,
                low=found and found.low,
                high=found and found.high,
                test=kind.test_name,
                p=None,
                corrected=None,
                verdict=NOT_MEASURED,
            )
        )
    _decide([(v, t) for v, t in zip(made, tested, strict=True) if t is not None])
    return made


def _decide(found: list[tuple[Verdict, Tested]]) -> None:
    """Fill in p and verdict of the claims that could be tested."""
    if not found:
        return
    corrected = stats.false_discovery_control([tested.p for _, tested in found])
    against = stats.false_discovery_control([tested.against for _, tested in found])
    for (verdict, tested), q, q_against in zip(found, corrected, against, strict=True):
        opposite = tested.against < tested.p
        verdict.p = tested.against if opposite else tested.p
        verdict.corrected = float(q_against if opposite else q)
        verdict.verdict = NOT_SHOWN
        if verdict.corrected < LEVEL:
            verdict.verdict = OPPOSITE if opposite else REPRODUCES


def _by_seed(side: Side, values: Values) -> Floats:
    """Return [N], the mean over the cells of a side; NaN where one of them has no number."""
    cells = [[np.nan if x is None else x for x in values[c][side.metric]] for c in side.cells]
    mean_N: Floats = np.mean(np.asarray(cells, dtype=np.float64), axis=0)
    return mean_N
